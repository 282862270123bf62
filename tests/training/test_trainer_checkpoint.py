"""Checkpoints: sharded state without pickle, on the way through a training, with and without Hugging Face weights."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, LoraSpec, OptimizerSpec
from rft_platform.common.digests import checkpoint_damage, digest_weights
from rft_platform.common.errors import DiskFullError, RftError, StorageError, TrainingCancelled
from rft_platform.common.files import read_json
from rft_platform.model_registry.mlflow_model import describe_checkpoint
from rft_platform.training.checkpoint.periodic import PeriodicCheckpoints
from rft_platform.training.checkpoint.writing import Publication
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.loop.training_run import TrainingRun
from rft_platform.training.models import loading
from rft_platform.training.models.shards import ShardReader, write_shards
from rft_platform.training.packed.packing import StaticLengths
from rft_platform.training.protocol import StepEvent

LORA = LoraSpec(rank=4, alpha=8)
ALLOWED = {".safetensors", ".json", ".jinja", ".md"}  # README.md comes with an adapter


def nothing(event: StepEvent) -> None: ...


def run(session, request, stop_after: int | None = None):
    """Train; ``stop_after`` cancels before the step after that one."""
    seen: list[StepEvent] = []
    return session.train(request, seen.append, lambda: stop_after is not None and len(seen) >= stop_after), seen


def stopped(session, request, after: int) -> None:
    with pytest.raises(TrainingCancelled):
        run(session, request, stop_after=after)


def tensors(folder: str | Path) -> dict[str, np.ndarray]:
    """Weights and moments of a checkpoint, the critic's too, and the state of the random generators."""
    files = sorted(Path(folder).rglob("*.safetensors"))
    return {f"{file.relative_to(folder)}/{name}": value for file in files for name, value in load_file(file).items()}


def largest_difference(one: str | Path, other: str | Path) -> float:
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys() and a
    return max(float(np.abs(a[name].astype(np.float64) - b[name]).max()) for name in a)


def weights_differ(one: str, other: str) -> float:
    """Largest difference of the published weights, in however many files they are."""
    a, b = (
        {name: value for file in Path(each).glob("*.safetensors") for name, value in load_file(file).items()}
        for each in (one, other)
    )
    assert a.keys() == b.keys() and a
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def on_the_way(request) -> list[str]:
    return sorted(path.name for path in Path(request.output, "intermediate").glob("*"))


def test_shards_round_trip_and_other_tensors_are_refused(tmp_path) -> None:
    saved = {"a": torch.randn(5, 3), "b": torch.tensor(7.0), "c": torch.arange(4)}
    write_shards(tmp_path, "state", saved, 0, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]
    found = {name: torch.zeros_like(value) for name, value in saved.items()}
    ShardReader(tmp_path).read(found)
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    with pytest.raises(StorageError, match=r"lacks 1 of the 1 tensors of this model, e\.g\. d"):
        ShardReader(tmp_path).read({"d": torch.zeros(1)})
    with pytest.raises(StorageError, match="other shapes"):
        ShardReader(tmp_path).read({"a": torch.zeros(5, 4)})
    (tmp_path / "state.safetensors").write_bytes(b"no header")
    with pytest.raises(StorageError, match="cannot be read"):
        ShardReader(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora": LORA},
        {"algorithm": AlgorithmSpec(token_advantage="gae", critic=CriticSpec(optimizer=OptimizerSpec(lr=1e-3)))},
        {"algorithm": AlgorithmSpec(correction="decoupled")},  # old log-probs are the parent's, not the checkpoint's
    ],
    ids=["full", "lora", "ppo", "decoupled"],
)
def test_a_training_continued_from_an_intermediate_checkpoint_equals_an_undisturbed_one(
    session, round_request, tmp_path, settings
) -> None:
    request = round_request(epochs=2, save_interval=2, **settings)  # 6 steps
    stopped(session, request, after=int(np.random.default_rng().integers(2, 6)))
    (name,) = on_the_way(request)
    assert name in ("step_2", "step_4")
    result, events = run(TrainingSession(session.ranks, "float32"), request)
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]
    straight, _ = run(session, replace(request, output=str(tmp_path / "straight"), save_interval=None))
    assert largest_difference(result.checkpoint, straight.checkpoint) <= 1e-6
    assert result.weights_digest == straight.weights_digest
    assert not Path(request.output, "intermediate").exists()


@pytest.mark.slow
def test_a_checkpoint_that_cannot_begin_ends_the_training(session, round_request, monkeypatch) -> None:
    def full(self: Publication) -> None:
        raise DiskFullError("no space left on the disk")

    monkeypatch.setattr(Publication, "_open", full)
    with pytest.raises(DiskFullError):
        run(session, round_request(save_interval=2))


@pytest.mark.slow
def test_a_trainer_killed_between_publication_and_cleaning_up_leaves_nothing(
    session, round_request, monkeypatch
) -> None:
    request = round_request(save_interval=2)

    def killed(self: PeriodicCheckpoints) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(PeriodicCheckpoints, "clear", killed)
        run(session, request)
    assert on_the_way(request) == ["step_2"]
    result, _ = run(TrainingSession(session.ranks, "float32"), request)
    assert result.reused
    assert on_the_way(request) == []


@pytest.fixture
def static_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models pad their packs to static lengths, as those on a GPU do."""
    prepare = loading.prepare_policy

    def prepared(policy, *rest) -> None:
        prepare(policy, *rest)
        policy.static = StaticLengths()

    monkeypatch.setattr(loading, "prepare_policy", prepared)


@pytest.mark.slow
@pytest.mark.usefixtures("static_lengths")
def test_every_model_knows_the_longest_row(session, round_request, tiny_model, tmp_path) -> None:
    """The policy also after it continues from an intermediate checkpoint, and a reference model."""
    request = round_request(save_interval=1, max_tokens_per_row=200, max_tokens_per_pack=300)
    stopped(session, request, after=2)
    continued = TrainingSession(session.ranks, "float32")
    result, _ = run(continued, request)
    assert continued.state.policy.static == StaticLengths(200)
    following = replace(request, parent=result.checkpoint, parent_version=3, reference=str(tiny_model), max_steps=1)
    run(continued, replace(following, algorithm=AlgorithmSpec(beta=0.1), output=str(tmp_path / "next")))
    assert continued._precompute.reference.model(tiny_model).static == StaticLengths(200)


@pytest.mark.slow
def test_mlflow_loads_a_trained_adapter_over_its_base_model(session, round_request, monkeypatch) -> None:
    result, _ = run(session, round_request(lora=LORA, groups=2, max_steps=1))
    folder = Path(result.checkpoint)
    assert describe_checkpoint(folder)
    assert checkpoint_damage(folder) is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings(action="ignore"):  # of MLflow's imports
        import mlflow.transformers

        pipeline = mlflow.transformers.load_model(str(folder))
    assert pipeline.model.peft_config["default"].r == LORA.rank
    modules = read_json(Path(result.checkpoint) / "adapter_config.json")["target_modules"]
    assert len(modules) > 3 and modules == sorted(modules)
    trained = load_file(folder / "adapter_model.safetensors")
    loaded = {name.replace(".default", ""): weight for name, weight in pipeline.model.state_dict().items()}
    assert trained and all(np.array_equal(loaded[name].numpy(), weight) for name, weight in trained.items())


@pytest.mark.slow
def test_it_does_not_start_again(session, round_request) -> None:
    request = round_request(epochs=2, save_interval=2)
    stopped(session, request, after=5)
    folder = Path(request.output, "intermediate", "step_4")
    assert {file.suffix for file in folder.rglob("*") if file.is_file()} <= ALLOWED
    assert not list(folder.glob("*.safetensors")) and (folder / "trainer_state" / "master.safetensors").exists()
    computed: list[int] = []
    original = type(session.state.optimizer).step
    try:
        type(session.state.optimizer).step = lambda self, *a: (computed.append(1), original(self, *a))[1]
        run(session, request)
    finally:
        type(session.state.optimizer).step = original
    assert len(computed) == 2


@pytest.mark.slow
def test_a_damaged_one_is_passed_over_for_the_one_before(session, round_request, caplog, tmp_path) -> None:
    request = round_request(epochs=2, save_interval=2, save_hf_checkpoint="always")
    stopped(session, request, after=5)
    assert on_the_way(request) == ["step_2", "step_4"]
    file = Path(request.output, "intermediate", "step_4", "trainer_state", "optimizer.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result, _ = run(session, request)
    assert "step_4 is skipped: trainer_state/optimizer.safetensors was changed after it was written" in caplog.text
    straight, _ = run(session, replace(request, output=str(tmp_path / "straight"), save_interval=None))
    assert largest_difference(result.checkpoint, straight.checkpoint) <= 1e-6


@pytest.mark.slow
def test_shards_are_not_read_again_for_the_manifest(session, round_request, monkeypatch) -> None:
    from rft_platform.training.checkpoint import manifest

    read: list[str] = []
    digest_file = manifest.digest_file
    monkeypatch.setattr(manifest, "digest_file", lambda path: (read.append(path.name), digest_file(path))[1])
    result, _ = run(session, round_request(save_hf_checkpoint="never"))
    assert not {"optimizer.safetensors", "master.safetensors"} & set(read) and "state.json" in read
    assert checkpoint_damage(Path(result.checkpoint)) is None


@pytest.mark.slow
def test_another_request_does_not_continue_from_the_checkpoint(session, round_request) -> None:
    request = round_request(epochs=2, save_interval=2)
    stopped(session, request, after=3)
    other = round_request(epochs=2, seed=3, save_interval=None)
    result, _ = run(session, other)
    fresh, _ = run(session, replace(other, output=str(Path(other.output, "fresh"))))
    assert result.weights_digest == fresh.weights_digest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last", "always"])
def test_files_of_an_abandoned_training_are_replaced(session, round_request, kind) -> None:
    small = {"groups": 6, "train_batch_size": 4}  # 6 steps
    settings = {"save_interval": 1, "save_hf_checkpoint": kind, "max_checkpoints_to_keep": 2} | small
    stopped(session, round_request(**settings), after=5)
    assert on_the_way(round_request(**settings))[-1] == "step_5"
    present = round_request(seed=3, **settings)
    stopped(session, present, after=3)
    assert on_the_way(present) == (["step_3"] if kind == "last" else ["step_2", "step_3"])
    steps: list[int] = []
    original = type(session.state.optimizer).step
    try:
        type(session.state.optimizer).step = lambda self, *a: (steps.append(1), original(self, *a))[1]
        run(session, present)
    finally:
        type(session.state.optimizer).step = original
    assert len(steps) == 3  # it went on from its own
    assert on_the_way(present) == ([] if kind == "last" else ["step_4", "step_5"])


@pytest.mark.slow
def test_what_earlier_trainings_left_for_others_stays_and_counts(session, round_request) -> None:
    settings = {"save_interval": 1, "save_hf_checkpoint": "always", "groups": 3, "train_batch_size": 4}
    first, _ = run(session, round_request(**settings))  # 3 steps
    after = {"seed": 2, "parent": first.checkpoint, "parent_version": 3}
    stopped(session, round_request(**after, **settings), after=2)
    assert on_the_way(round_request()) == ["step_1", "step_2", "step_4", "step_5"]
    run(session, round_request(**(after | {"seed": 3}), **(settings | {"save_interval": None})))
    assert on_the_way(round_request()) == ["step_1", "step_2"]
    run(session, round_request(**(after | {"seed": 4}), **settings, max_checkpoints_to_keep=3))
    assert on_the_way(round_request()) == ["step_2", "step_4", "step_5"]


@pytest.mark.slow
def test_a_manifest_has_the_seconds_until_it_was_written(session, round_request, monkeypatch) -> None:
    made, live = [], []

    original = TrainingRun.manifest

    def described(self, events):
        """The manifest as it is given to the writer."""
        made.append(original(self, events))
        live.append(dict(made[-1].result["seconds"]))
        return made[-1]

    monkeypatch.setattr(TrainingRun, "manifest", described)
    result, _ = run(session, round_request(epochs=2, save_interval=2))
    assert [manifest.result["seconds"] for manifest in made] == live and len(made) == 3
    assert result.seconds["save"] > live[-1]["save"]


@pytest.mark.slow
def test_always_leaves_hugging_face_folders_and_keeps_as_many_as_wanted(session, round_request) -> None:
    from transformers import AutoModelForCausalLM

    request = round_request(epochs=2, save_interval=1, save_hf_checkpoint="always", max_checkpoints_to_keep=2)
    result, _ = run(session, request)
    assert on_the_way(request) == ["step_4", "step_5"]
    loaded = AutoModelForCausalLM.from_pretrained(Path(request.output, "intermediate", "step_5"))
    final = load_file(Path(result.checkpoint, "model.safetensors"))
    moved = [float(np.abs(final[name] - p.detach().numpy()).max()) for name, p in loaded.named_parameters()]
    assert 0 < max(moved) < 0.01  # one step before


@pytest.mark.slow
def test_large_weights_come_in_several_files_and_training_continues_from_them(
    session, round_request, tmp_path, monkeypatch
) -> None:
    from rft_platform.training.checkpoint import content

    whole, _ = run(session, round_request())
    monkeypatch.setattr(content, "_WEIGHTS_FILE_BYTES", 200_000)
    parts, _ = run(session, round_request(output=str(tmp_path / "parts")))
    folder = Path(parts.checkpoint)
    assert len(list(folder.glob("model-*.safetensors"))) > 3 and (folder / "model.safetensors.index.json").exists()
    assert digest_weights(folder) == parts.weights_digest
    assert weights_differ(parts.checkpoint, whole.checkpoint) <= 1e-6

    def child_of(parent: str, name: str) -> str:
        request = round_request(seed=1, parent=parent, parent_version=whole.policy_version, output=str(tmp_path / name))
        return str(run(TrainingSession(session.ranks, "float32"), request)[0].checkpoint)

    one, two = child_of(whole.checkpoint, "one"), child_of(parts.checkpoint, "two")
    assert weights_differ(one, two) <= 1e-6 < weights_differ(one, whole.checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_never_saves_only_state_from_which_training_continues_equally(ranks, round_request, tmp_path, dtype) -> None:
    session = TrainingSession(ranks, dtype)
    first = round_request(seed=1, save_hf_checkpoint="never")
    bare, _ = run(session, first)
    assert not list(Path(bare.checkpoint).glob("*.safetensors"))
    with safe_open(Path(bare.checkpoint, "trainer_state", "optimizer.safetensors"), "pt") as header:
        assert "DCP_SHARDING_INFO" not in (header.metadata() or {})  # one rank writes whole tensors, under FSDP too
    full, _ = run(session, replace(first, save_hf_checkpoint="last", output=str(tmp_path / "full")))
    after = []
    for result in (bare, full):
        second = round_request(seed=2, parent=result.checkpoint, parent_version=3)
        after.append(run(TrainingSession(ranks, dtype), replace(second, output=f"{result.checkpoint}.next"))[0])
    assert after[0].weights_digest == after[1].weights_digest
    again, _ = run(session, replace(first, save_hf_checkpoint="last"))  # the weights are wanted after all
    assert not again.reused and list(Path(again.checkpoint).glob("*.safetensors"))


@pytest.mark.slow
def test_the_position_in_demonstrations_is_that_of_the_step(session, sft_request, tmp_path) -> None:
    pairs = [(f"{n} plus one is", f"{n + 1}.") for n in range(10)]
    request = sft_request(pairs, train_batch_size=4, max_steps=6, save_interval=2, save_hf_checkpoint="always")
    run(session, request)
    positions = {
        name: read_json(Path(request.output, "intermediate", name, "trainer_state", "state.json"))["position"]["rows"]
        for name in on_the_way(request)
    }
    assert positions == {"step_2": 8, "step_4": 16}


@pytest.mark.slow
def test_a_failed_write_is_reported_and_leaves_no_file(session, round_request, monkeypatch) -> None:
    from rft_platform.training.checkpoint import content

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    request = round_request(epochs=2, save_interval=2)
    monkeypatch.setattr(content, "write_shards", full)
    with pytest.raises(RftError, match="no space left on the disk"):
        run(session, request)
    assert on_the_way(request) == []
    assert session.state is not None and str(session.state.folder) == request.parent
    monkeypatch.undo()
    assert run(session, request)[0].steps == 6
