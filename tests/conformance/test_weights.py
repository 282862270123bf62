"""Changing the weights under a running engine."""

import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import EngineError, WeightMismatchError
from rft_platform.common.files import digest_file
from rft_platform.inference.canary import Canary, check_canary, update_checked
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import Generation, SamplingParams

from .conftest import CANARY, EXACT, PROMPTS, Reference, close

pytestmark = pytest.mark.usefixtures("restored")
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


def canary_of(reference: Reference) -> Canary:
    return Canary(PROMPTS, [reference.logprobs(prompt) for prompt in PROMPTS])


def test_new_weights_answer_as_they_should_tied_head_included(
    engine: EngineClient, memorised: Path, reference: Reference
) -> None:
    before = engine.generate(PROMPTS, SamplingParams(8, seed=1))
    engine.update_weights(memorised, 41)
    status, trained = engine.status(), Reference(memorised)
    assert (status.policy_version, status.weights_path) == (41, str(memorised))
    assert status.weights_digest == digest_file(memorised / "model.safetensors")
    after = engine.generate(PROMPTS, SamplingParams(8, seed=1))
    assert [g.policy_version for g in before + after] == [0] * 6 + [41] * 6
    assert [g.completions[0].token_ids for g in before] != [g.completions[0].token_ids for g in after]
    for generation in after:
        ids = generation.prompt_ids + generation.completions[0].token_ids
        assert close(generation.completions[0].logprobs, trained.logprobs(ids)[len(generation.prompt_ids) :])
    assert check_canary(engine, canary_of(trained)) < CANARY
    with pytest.raises(WeightMismatchError, match="version 41"):
        check_canary(engine, canary_of(reference))


def test_an_engine_that_slept_answers_as_before_and_takes_new_weights(
    engine: EngineClient, memorised: Path, reference: Reference
) -> None:
    """On a GPU the sleep frees the memory; an engine that cannot sleep goes on."""
    greedy = SamplingParams(8, temperature=0.0)
    before = engine.generate(PROMPTS, greedy)
    engine.sleep()
    assert engine.status().policy_version == 0  # the engine reports while it sleeps
    engine.sleep()
    after = engine.generate(PROMPTS, greedy)
    assert [g.completions[0].token_ids for g in after] == [g.completions[0].token_ids for g in before]
    engine.sleep()
    assert check_canary(engine, canary_of(reference)) < CANARY
    engine.sleep()
    engine.update_weights(memorised, 43)
    assert check_canary(engine, canary_of(Reference(memorised))) < CANARY


def test_a_changed_tensor_is_noticed_by_the_canary(
    engine: EngineClient, variant: Callable[..., Path], reference: Reference
) -> None:
    def perturb(tensors: dict[str, Any]) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"].mul_(1.5 if EXACT else -20)

    before = engine.status()
    with pytest.raises(WeightMismatchError, match="nats"):
        update_checked(engine, variant(perturb), 5, canary_of(reference))
    after = engine.status()
    assert (after.policy_version, after.weights_digest) == (before.policy_version, before.weights_digest)
    assert not after.paused
    assert check_canary(engine, canary_of(reference)) < CANARY  # the old weights are back


def test_a_weight_update_that_passes_its_canary_is_served(engine: EngineClient, memorised: Path) -> None:
    difference = update_checked(engine, memorised, 7, canary_of(Reference(memorised)))
    assert difference is not None and difference < CANARY
    assert engine.status().policy_version == 7


def test_twenty_weight_updates_leave_no_tensor_of_earlier_weights(
    engine: EngineClient, variant: Callable[..., Path]
) -> None:
    import torch

    draw = torch.Generator().manual_seed(7)

    def move(tensors: dict[str, Any]) -> None:
        for tensor in tensors.values():  # every one of them, the tied head included
            tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=draw)

    for version in range(1, 21):
        folder = variant(move, f"version-{version}")
        difference = update_checked(engine, folder, version, canary_of(Reference(folder)))
        assert difference is not None and difference <= (1e-4 if EXACT else CANARY)
        assert engine.status().policy_version == version
        shutil.rmtree(folder)


def test_a_check_that_is_interrupted_leaves_the_engine_paused(
    engine: EngineClient, memorised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "score_everywhere", interrupted)
    with pytest.raises(KeyboardInterrupt):
        update_checked(engine, memorised, 7, canary_of(Reference(memorised)))
    assert engine.status().paused, "nobody has compared these weights"


@pytest.mark.parametrize("step", ["update_weights", "score_everywhere"])
def test_after_another_error_the_old_weights_serve(
    engine: EngineClient, memorised: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real, failed = getattr(engine, step), list[str]()

    def fail_once(*given: Any) -> Any:
        if failed:
            return real(*given)
        failed.append(step)
        raise EngineError("the disk does not answer")

    before = engine.status()
    monkeypatch.setattr(engine, step, fail_once)
    with pytest.raises(EngineError, match="the disk"):
        update_checked(engine, memorised, 7, canary_of(Reference(memorised)))
    after = engine.status()
    assert (after.policy_version, after.weights_digest, after.paused) == (
        before.policy_version, before.weights_digest, False,
    )  # fmt: skip


def rename(tensors: dict[str, Any]) -> None:
    tensors["model.norm.bias"] = tensors.pop(NORM)


def reshape(tensors: dict[str, Any]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


def drop(tensors: dict[str, Any]) -> None:
    del tensors[EMBEDDING]


def untie(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors[EMBEDDING] + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, r"1 missing \(model.norm.weight\); 1 unexpected \(model.norm.bias\)"),
        (reshape, r"model.norm.weight has shape \(\d+,\); in the served model it has shape \(\d+,\)"),
        (drop, r"1 missing \(model.embed_tokens.weight\)"),
        (untie, r"lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    engine: EngineClient, variant: Callable[..., Path], reference: Reference, change: Callable[..., None], message: str
) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].mul_(2)  # would be seen if any tensor were taken over
        change(tensors)

    before = engine.status()
    with pytest.raises(WeightMismatchError, match=message):
        engine.update_weights(variant(spoil), 9)
    after = engine.status()
    assert (after.policy_version, after.weights_digest) == (before.policy_version, before.weights_digest)
    assert check_canary(engine, canary_of(reference)) < CANARY


def test_a_half_written_file_and_a_missing_folder_are_refused(
    engine: EngineClient, variant: Callable[..., Path], reference: Reference, tmp_path: Path
) -> None:
    folder = variant(lambda _: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightMismatchError, match="complete"):
        engine.update_weights(folder, 2)
    with pytest.raises(WeightMismatchError, match=r"no \.safetensors"):
        engine.update_weights(tmp_path / "nowhere", 2)
    assert check_canary(engine, canary_of(reference)) < CANARY


def test_a_tied_head_may_be_written_out(
    engine: EngineClient, variant: Callable[..., Path], reference: Reference
) -> None:
    def write_head(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()

    engine.update_weights(variant(write_head), 3)
    assert check_canary(engine, canary_of(reference)) < CANARY


def test_a_lora_adapter_is_merged(engine: EngineClient, tiny_model: Path, memorised: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = Reference(tiny_model)
    merged.model = adapted.eval()
    for version in (1, 2):  # the second time upon the base again, not upon the merged weights
        engine.update_weights(tmp_path / "adapter", version)
        assert check_canary(engine, canary_of(merged)) < CANARY
    assert engine.status().policy_version == 2
    engine.update_weights(memorised, 3)
    engine.update_weights(tmp_path / "adapter", 4)  # upon its own base, not upon the last full weights
    assert check_canary(engine, canary_of(merged)) < CANARY


def test_requests_under_way_finish_on_the_weights_they_began_with(engine: EngineClient, memorised: Path) -> None:
    trained, first = Reference(memorised), Reference(Path(engine.status().model_path))
    answers: queue.Queue[Generation] = queue.Queue()
    results: list[Generation] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            for generation in engine.generate(PROMPTS[:2], SamplingParams(24, n=2)):
                answers.put(generation)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version, folder in ((1, memorised), (2, Path(engine.status().model_path)), (3, memorised)):
        while not results or results[-1].policy_version < version - 1:  # each version answers before the next one
            results.append(answers.get(timeout=60))
        engine.update_weights(folder, version)
    stop.set()
    for thread in threads:
        thread.join()
    results += [answers.get_nowait() for _ in range(answers.qsize())]
    assert {generation.policy_version for generation in results} >= {0, 1, 2}
    for generation in results:
        expected = trained if generation.policy_version in (1, 3) else first
        for done in generation.completions:
            scores = expected.logprobs(generation.prompt_ids + done.token_ids)[len(generation.prompt_ids) :]
            assert close(done.logprobs, scores)


def test_weights_that_are_not_finite_are_refused(
    engine: EngineClient, variant: Callable[..., Path], reference: Reference
) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[NORM][0] = float("nan")

    with pytest.raises(WeightMismatchError, match="not finite"):
        engine.update_weights(variant(spoil), 5)
    assert engine.status().policy_version == 0
    assert check_canary(engine, canary_of(reference)) < CANARY


def test_weights_whose_logprobs_are_not_finite_are_refused(
    engine: EngineClient, variant: Callable[..., Path], reference: Reference
) -> None:
    def overflow(tensors: dict[str, Any]) -> None:
        tensors[NORM].fill_(3e38)

    with pytest.raises(WeightMismatchError, match="not finite"):
        update_checked(engine, variant(overflow), 5, canary_of(reference))
    assert check_canary(engine, canary_of(reference)) < CANARY
    if EXACT:  # in 16 bits, on a GPU, vLLM would sample ids that do not exist, and die
        engine.update_weights(variant(overflow, "again"), 6)
        with pytest.raises(EngineError, match="not finite"):
            engine.generate(PROMPTS, SamplingParams(4))
