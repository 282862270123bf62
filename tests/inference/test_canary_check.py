"""The canary check on the engine's own forward pass of the tiny model, without an engine process."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import DamagedError, EngineError, WeightMismatchError
from rft_platform.inference.canary import Canary, check_canary, mean_difference, update_checked
from rft_platform.inference.interface import EngineStatus
from rft_platform.inference.pool.weights import PoolWeights
from rft_platform.inference.transformers_engine.model import PolicyModel
from rft_platform.inference.transformers_engine.weights import read_tensors, replace_weights
from rft_platform.rounds.project.policy import deploy
from rft_platform.rounds.project.record import Policy

SEQUENCES = [[5, 9, 12, 40, 7], [3, 300, 8]]
HEAD = "model.embed_tokens.weight"  # tied to the output head
LARGEST = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}  # accepted mean difference in nats, by dtype


@dataclass
class Process:
    """A process of an engine. It keeps its old copy of the tensors ``stale``, but reports each update as complete."""

    model: PolicyModel
    folder: Path
    policy_version: int = 0
    dtype: str = "float32"
    paused: bool = False
    stale: tuple[str, ...] = ()
    #: the folders and whether the process was paused meanwhile
    updates: list[tuple[Path, bool]] = field(default_factory=list)
    url: str = "http://first"

    def status(self) -> EngineStatus:
        return EngineStatus(
            engine="transformers", model_path=str(self.folder), policy_version=self.policy_version,
            weights_digest=digest_weights(self.folder), template_hash="t", paused=self.paused, dtype=self.dtype,
            max_model_len=512, pid=1, cpu_seconds=0.0, weights_path=str(self.folder),
        )  # fmt: skip

    def render(self, conversations: Iterable[Any]) -> list[list[int]]:
        return SEQUENCES

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        return self.model.score(sequences)

    def fetch_weights(self, folder: Path) -> None:
        """Does nothing, because the process sees all folders."""

    def update_weights(self, folder: Path, policy_version: int) -> None:
        own = self.model.module.state_dict()
        tensors = {name: own[name] if name in self.stale else new for name, new in read_tensors(folder).items()}
        replace_weights(self.model.module, tensors, folder)
        self.folder, self.policy_version = folder, policy_version
        self.updates.append((folder, self.paused))

    def pause(self, mode: str = "wait") -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


class Engine(Process):
    """An engine of two processes."""

    second: Process

    def score_everywhere(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        return {process.url: process.score(sequences) for process in (self, self.second)}

    def update_weights(self, folder: Path, policy_version: int) -> None:
        super().update_weights(folder, policy_version)
        self.second.update_weights(folder, policy_version)


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model's weights after a small training step."""
    folder = tmp_path_factory.mktemp("trained")
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(tiny_model / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def models(tiny_model: Path) -> tuple[PolicyModel, PolicyModel]:
    first, second = (PolicyModel(tiny_model, torch.float32, torch.device("cpu")) for _ in range(2))
    return first, second


@pytest.fixture
def engine(models: tuple[PolicyModel, PolicyModel], tiny_model: Path) -> Engine:
    """Both processes serve the tiny model."""
    for model in models:
        replace_weights(model.module, read_tensors(tiny_model), tiny_model)
    engine = Engine(models[0], tiny_model)
    engine.second = Process(models[1], tiny_model, url="http://second")
    return engine


@pytest.fixture
def canary(tiny_model: Path, trained: Path) -> Canary:
    """The log-probs of the trained weights by the forward pass of transformers, as the trainer has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.load_state_dict(load_file(trained / "model.safetensors"), strict=False)
    logprobs = []
    for sequence in SEQUENCES:
        ids = torch.tensor(sequence)
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append([0.0, *logp.gather(1, ids[1:, None])[:, 0].tolist()])
    return Canary(SEQUENCES, logprobs)


def test_the_weights_of_the_trainer_are_served(engine: Engine, trained: Path, canary: Canary) -> None:
    difference = update_checked(engine, trained, 8, canary)
    assert difference is not None and difference < 1e-5
    assert (engine.policy_version, engine.folder, engine.paused) == (8, trained, False)


def test_an_engine_serves_on_after_a_pause_that_failed(
    engine: Engine, tiny_model: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(mode: str) -> None:
        engine.paused = True
        raise EngineError("the engine does not answer pause: timed out")

    monkeypatch.setattr(engine, "pause", late)
    with pytest.raises(EngineError, match="timed out"):
        update_checked(engine, trained, 8, None)
    assert (engine.policy_version, engine.folder, engine.paused) == (0, tiny_model, False)


@pytest.mark.parametrize("stale", ["first", "second"])
def test_a_stale_output_head_in_any_process_is_refused(
    engine: Engine, tiny_model: Path, trained: Path, canary: Canary, stale: str
) -> None:
    before = engine.score(SEQUENCES)
    (engine if stale == "first" else engine.second).stale = (HEAD,)
    with pytest.raises(WeightMismatchError, match=f"policy version 8: the log-probs of the engine at http://{stale} "):
        update_checked(engine, trained, 8, canary)
    assert engine.updates == [(trained, True), (tiny_model, True)], "no request is sampled with unchecked weights"
    assert (engine.policy_version, engine.paused, engine.score(SEQUENCES)) == (0, False, before)


def test_files_that_are_not_the_published_ones_are_refused_before_a_request_is_sampled(
    engine: Engine, tiny_model: Path, trained: Path, canary: Canary
) -> None:
    for known in (canary, None):
        engine.updates.clear()
        with pytest.raises(DamagedError, match="those published had beefbeef"):
            update_checked(engine, trained, 8, known, "beefbeef")
        assert engine.updates == [(trained, True), (tiny_model, True)]
        assert (engine.policy_version, engine.paused) == (0, False)


def test_an_engine_whose_weights_cannot_be_restored_stays_paused(
    engine: Engine, trained: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_the_second_update(folder: Path, policy_version: int) -> None:
        if engine.updates:
            raise EngineError("the engine does not answer")
        Engine.update_weights(engine, folder, policy_version)

    engine.stale = (HEAD,)
    monkeypatch.setattr(engine, "update_weights", fail_at_the_second_update)
    with pytest.raises(WeightMismatchError):
        update_checked(engine, trained, 8, canary)
    assert engine.paused and engine.policy_version == 8


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_mean_difference_has_a_limit_by_dtype(engine: Engine, dtype: str) -> None:
    engine.dtype = dtype

    def canary(difference: float) -> Canary:
        """Log-probs that differ from the engine's by ``difference`` on average, once more and once less."""
        signs = [[0.0, 1.5, -0.5, 1.5, -0.5], [0.0, 1.0, -1.0]]
        served = engine.score(SEQUENCES)
        return Canary(
            SEQUENCES,
            [
                [value + sign * difference for value, sign in zip(*pair, strict=True)]
                for pair in zip(served, signs, strict=True)
            ],
        )

    assert check_canary(engine, canary(0.9 * LARGEST[dtype])) == pytest.approx(0.9 * LARGEST[dtype], rel=1e-2)
    for difference in (1.1 * LARGEST[dtype], math.nan):
        with pytest.raises(WeightMismatchError, match=f"is allowed in {dtype}"):
            check_canary(engine, canary(difference))


def test_every_token_but_the_first_counts_once() -> None:
    assert mean_difference([[9.0, -1.0, -2.0, -3.0], [9.0, -1.0]], [[0.0, -2.0, -1.0, -3.0], [0.0, 1.0]]) == 1.0


def test_deploy_checks_the_canary_until_a_check_has_passed(engine: Engine, trained: Path, canary: Canary) -> None:
    policy = Policy(str(trained), 8, digest_weights(trained), 1, canary)
    engine.stale = (HEAD,)
    with pytest.raises(WeightMismatchError, match="the version is refused"):
        deploy(engine, policy)
    engine.pause()  # a deployment that was interrupted after the update
    engine.update_weights(trained, 8)
    with pytest.raises(WeightMismatchError, match="the version is refused"):
        deploy(engine, policy)
    assert engine.paused
    engine.stale = ()
    difference = deploy(engine, policy)
    assert difference is not None and difference < 1e-5 and not engine.paused
    assert deploy(engine, policy) is None, "nothing changed"


def test_a_folder_that_changed_after_its_publication_is_refused(
    engine: Engine, tiny_model: Path, trained: Path, canary: Canary
) -> None:
    published = Policy(str(trained), 8, "digest of other bytes", 1, canary)
    with pytest.raises(DamagedError, match="restore the folder"):
        deploy(engine, published)
    assert (engine.policy_version, engine.folder, engine.paused) == (0, tiny_model, False)


@pytest.mark.parametrize("stale", [(), (HEAD,)])
def test_a_replica_that_returns_is_compared_with_its_pool(
    engine: Engine, trained: Path, tiny_model: Path, stale: tuple[str, ...]
) -> None:
    serving, returned = engine, engine.second
    Process.update_weights(serving, trained, 8)
    returned.stale = stale
    bring_up: Callable[..., None] = PoolWeights().bring_up  # the tests have no HTTP client
    refused = pytest.raises(WeightMismatchError, match="restarted with policy version 8, but its log-probs differ")
    with refused if stale else nullcontext():
        bring_up(returned, [serving])
    assert returned.paused is bool(stale), "a process with wrong weights serves nothing"
