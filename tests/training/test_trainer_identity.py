"""What makes two trainings, two models or two states the same, and that models which are only read are verified."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from rft_platform.algorithms.spec import (
    AlgorithmSpec,
    CriticSpec,
    ExpertSchedule,
    LoraSpec,
    OptimizerSpec,
)
from rft_platform.common import digests
from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import DamagedError
from rft_platform.common.files import read_json, write_sealed_json
from rft_platform.training.checkpoint.manifest import identify
from rft_platform.training.loop.plan import training_identity
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import Layout, TrainRequest

LORA = LoraSpec(rank=2, alpha=4)


def train(session: TrainingSession, request):
    return session.train(request, lambda event: None, lambda: False)


def change_weights(folder: Path, by: float = 1.0) -> None:
    """Other weights in a file that is whole."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: value + by for name, value in tensors.items()}, file, metadata={"format": "pt"})


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_whatever_changes_tokens_or_weights_makes_another_model(model: Path, name: str) -> None:
    before, weights = identify(model), digest_weights(model)
    (model / name).write_text((model / name).read_text() + "\n" if (model / name).exists() else "{}")
    assert identify(model) != before
    assert digest_weights(model) == weights  # what engines report
    (model / "README.md").write_text("of no consequence")
    assert identify(model) == identify(model) != before


def test_a_model_is_hashed_once_until_a_file_changes(model: Path, monkeypatch) -> None:
    read: list[str] = []
    original = digests.digest_file
    monkeypatch.setattr(digests, "digest_file", lambda path: (read.append(path.name), original(path))[1])
    before = identify(model)
    assert read.count("model.safetensors") == 1 and "config.json" in read
    read.clear()
    assert identify(model) == before and read == []
    change_weights(model)
    assert identify(model) != before and read == ["model.safetensors"]


@pytest.mark.slow
def test_another_chat_template_or_format_is_another_training(session, ranks, round_request, model) -> None:
    request = round_request(parent=str(model), groups=2, max_steps=1)
    train(session, request)
    assert train(TrainingSession(ranks, "float32"), request).reused
    assert not train(TrainingSession(ranks, "bfloat16"), request).reused
    assert train(TrainingSession(ranks, "bfloat16"), request).reused
    rounded = replace(ranks, layout=Layout(reduce_dtype="bfloat16"))
    assert not train(TrainingSession(rounded, "bfloat16"), request).reused
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    assert not train(TrainingSession(rounded, "bfloat16"), request).reused


@pytest.mark.slow
@pytest.mark.parametrize("part", ["reference", "teacher", "critic"])
def test_a_damaged_model_that_is_only_read_is_refused(session, round_request, tmp_path, part) -> None:
    read = Path(train(session, round_request(groups=2, max_steps=1)).checkpoint)
    settings = {
        "reference": {"reference": str(read), "algorithm": AlgorithmSpec(beta=0.1)},
        "teacher": {"teacher": str(read), "algorithm": AlgorithmSpec(token_advantage="on_policy_distill")},
        "critic": {"algorithm": AlgorithmSpec(token_advantage="gae", critic=CriticSpec(folder=str(read)))},
    }[part]
    request = round_request(seed=2, groups=2, max_steps=1, output=str(tmp_path / "next"), **settings)
    whole = train(session, request)
    assert whole.steps == 1
    change_weights(read, by=0.5)
    with pytest.raises(DamagedError, match=r"global_step_1 is damaged: model.safetensors"):
        train(TrainingSession(session.ranks, "float32"), replace(request, output=str(tmp_path / "again")))


def test_an_adapter_continues_only_on_its_base_weights(session, ranks, round_request, model) -> None:
    first = train(session, round_request(parent=str(model), lora=LORA, groups=2, max_steps=1))
    manifest = read_json(Path(first.checkpoint, "manifest.json"))
    assert manifest["base_digest"] == digest_weights(model)
    settings = {"parent": first.checkpoint, "parent_version": 1, "lora": LORA, "max_steps": 1}
    following = round_request(seed=2, **settings)
    before = identify(Path(first.checkpoint))
    assert train(TrainingSession(ranks, "float32"), following).steps == 1
    change_weights(model)
    with pytest.raises(DamagedError, match=r"base model .*: holds other weights .* than the adapter in"):
        train(TrainingSession(ranks, "float32"), replace(following, output=following.output + "-again"))
    on_other = manifest | {"base_digest": digest_weights(model)}
    write_sealed_json(Path(first.checkpoint, "manifest.json"), on_other)
    assert identify(Path(first.checkpoint)) != before  # the same adapter over other weights is another policy


def test_an_adapter_in_a_copied_project_continues_on_the_copied_weights(
    session, ranks, round_request, tiny_model, tmp_path
) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    model = Path(shutil.copytree(tiny_model, original / "model"))
    settings = {"lora": LORA, "groups": 2, "max_steps": 1}
    first = train(session, round_request(parent=str(model), output=str(original / "checkpoints"), **settings))
    shutil.copytree(original, copy)
    change_weights(model)  # the copy does not read the original
    settings |= {"parent": str(copy / "checkpoints" / Path(first.checkpoint).name), "parent_version": 1}
    second = train(
        TrainingSession(ranks, "float32"), round_request(seed=2, output=str(copy / "checkpoints"), **settings)
    )
    assert read_json(Path(second.checkpoint, "manifest.json"))["base_model"] == str(copy / "model")


@pytest.mark.slow
def test_an_adapter_over_a_damaged_checkpoint_is_refused(session, ranks, round_request, tmp_path) -> None:
    base = Path(train(session, round_request(groups=2, max_steps=1)).checkpoint)
    lora = {"lora": LORA, "max_steps": 1, "parent_version": 1, "output": str(tmp_path / "adapter")}
    first = train(session, round_request(seed=2, parent=str(base), **lora))
    change_weights(base, by=0.5)
    following = round_request(seed=3, **(lora | {"parent": first.checkpoint, "parent_version": 2}))
    with pytest.raises(DamagedError, match=r"global_step_1 is damaged: model.safetensors"):
        train(TrainingSession(ranks, "float32"), following)


def identity_with(algorithm: AlgorithmSpec, **settings) -> str:
    request = TrainRequest("parent", 4, "output", algorithm, OptimizerSpec(), **settings)
    return training_identity(request, "parent digest", "data digest", None, ("float32", "float32"))


CORRECTED = AlgorithmSpec(token_mask=(0.5, 5.0), row_mask=(0.9, 1.1), correction="decoupled", weight_cap=3.0)


@pytest.mark.parametrize(
    "change",
    [
        {"row_mask_ratio": "product"},
        {"token_veto": 1e-4},
        {"weight_level": "sequence"},
        {"weight_bound": "mask"},
        {"expert_schedule": ExpertSchedule(decay_steps=4)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_makes_another_training(change: dict) -> None:
    assert identity_with(replace(CORRECTED, **change)) != identity_with(CORRECTED)


def test_a_training_that_starts_again_from_an_earlier_policy_is_another_one() -> None:
    assert identity_with(AlgorithmSpec(), steps_before=8) != identity_with(AlgorithmSpec())
