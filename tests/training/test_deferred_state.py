"""The trainer state is saved after the weights, in the background; a state that was not saved is trained again."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, LoraSpec, OptimizerSpec
from rft_platform.common.digests import SAVED_STATE, checkpoint_damage
from rft_platform.common.errors import DiskFullError, StorageError
from rft_platform.training.checkpoint.content import Draft
from rft_platform.training.checkpoint.manifest import read_manifest
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.protocol import TrainRequest, TrainResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # up to ten trainings in one test

PPO = AlgorithmSpec(token_advantage="gae", critic=CriticSpec(optimizer=OptimizerSpec(lr=1e-3)))
KINDS = {"full": {}, "ppo": {"algorithm": PPO}, "lora": {"lora": LoraSpec(rank=4, alpha=8)}}


def train(session: TrainingSession, request: TrainRequest) -> TrainResult:
    return session.train(request, lambda event: None, lambda: False)


def chain(session, round_request, rounds: int, start: TrainResult | None = None, first: int = 1, **fields):
    """Train ``rounds`` rounds of different rows, each from the one before."""
    results = [] if start is None else [start]
    for number in range(first, first + rounds):
        parent = {"parent": results[-1].checkpoint, "parent_version": results[-1].policy_version} if results else {}
        results.append(train(session, round_request(seed=number, **(fields | parent))))
    return results


def tensors(folder: str) -> dict[str, np.ndarray]:
    files = sorted(Path(folder).rglob("*.safetensors"))
    return {f"{file.relative_to(folder)}/{name}": value for file in files for name, value in load_file(file).items()}


def largest_difference(one: str, other: str) -> float:
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys() and a
    return max(float(np.abs(a[name].astype(np.float64) - b[name]).max()) for name in a)


def saved(result: TrainResult) -> bool:
    return Path(result.checkpoint, SAVED_STATE).exists()


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS.keys())
def test_a_checkpoint_saved_later_equals_one_saved_at_once(session, round_request, tmp_path, fields) -> None:
    (later,) = chain(session, round_request, 1, save_state="later", **fields)
    manifest = read_manifest(Path(later.checkpoint))
    assert manifest.deferred_state and not any("optimizer" in name for name in manifest.files)
    session.close()
    assert saved(later) and checkpoint_damage(Path(later.checkpoint)) is None
    assert not list(Path(later.checkpoint).rglob(".saving"))
    (now,) = chain(TrainingSession(session.ranks, "float32"), round_request, 1, output=str(tmp_path / "now"), **fields)
    assert largest_difference(later.checkpoint, now.checkpoint) == 0.0
    assert manifest.state_digest == read_manifest(Path(now.checkpoint)).state_digest


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS.keys())
def test_a_killed_trainer_repeats_three_rounds_that_were_not_saved(
    session, round_request, tmp_path, caplog, fields
) -> None:
    """Rounds of three steps, saved at step 3 (round 1): the next trainer repeats rounds 2 to 4, then trains round 5."""
    straight = chain(session, round_request, 5, output=str(tmp_path / "straight"), **fields)
    fields |= {"save_state": "later", "save_interval": 100}
    saving = TrainingSession(session.ranks, "float32")
    first = chain(saving, round_request, 1, **(fields | {"save_interval": 1}))
    saving.close()  # its thread has saved the state
    killed = chain(TrainingSession(session.ranks, "float32"), round_request, 3, start=first[0], first=2, **fields)
    assert [saved(result) for result in killed] == [True, False, False, False]

    with caplog.at_level(logging.INFO):
        after = TrainingSession(session.ranks, "float32")
        *_, last = chain(after, round_request, 1, start=killed[-1], first=5, **(fields | {"save_state": "now"}))
    assert (
        caplog.text.count("repeating its training") == 3
        and "weights of the repeated training differ" not in caplog.text
    )
    assert last.weights_digest == straight[-1].weights_digest
    assert largest_difference(last.checkpoint, straight[-1].checkpoint) == 0.0


def test_a_killed_save_is_repeated_and_its_leftovers_are_replaced(session, round_request) -> None:
    one, two = chain(session, round_request, 2, save_state="later")
    session.close()
    folder = Path(two.checkpoint)
    whole = tensors(two.checkpoint)
    (folder / SAVED_STATE).unlink()  # killed after half of the files were in place
    left = folder / "trainer_state" / ".saving"
    left.mkdir()
    shutil.move(folder / "trainer_state" / "optimizer.safetensors", left)

    after = TrainingSession(session.ranks, "float32")
    train(after, round_request(seed=3, parent=two.checkpoint, parent_version=two.policy_version, save_state="now"))
    assert after.state is not None and saved(one) and not left.exists()
    assert read_manifest(folder).weights_digest == two.weights_digest and whole


def test_a_state_that_cannot_be_written_is_written_before_the_next_training(
    session, round_request, monkeypatch
) -> None:
    broken = [True, True]

    def write(draft: Draft, folder: Path | None, state: Path, ranks: Ranks, write=Draft.write) -> dict[Path, str]:
        if folder is None and broken and broken.pop():
            raise OSError(28, "No space left on device")
        return write(draft, folder, state, ranks)

    monkeypatch.setattr(Draft, "write", write)
    (one,) = chain(session, round_request, 1, save_state="later")
    following = round_request(seed=2, parent=one.checkpoint, parent_version=one.policy_version)
    session._saving._ended.wait()
    with pytest.raises(DiskFullError, match="no space for the trainer state, which needs"):
        train(session, following)
    assert not saved(one)
    train(session, following)
    assert saved(one) and checkpoint_damage(Path(one.checkpoint)) is None


def test_a_checkpoint_that_was_moved_aside_is_not_written_again(session, round_request, monkeypatch, caplog) -> None:
    def write(draft: Draft, folder: Path | None, state: Path, ranks: Ranks, write=Draft.write) -> dict[Path, str]:
        if folder is not None:
            return write(draft, folder, state, ranks)
        state.parents[1].rename(state.parents[2] / "damaged")
        raise FileNotFoundError(state)

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "write", write)
        (one,) = chain(session, round_request, 1, save_state="later")
        session._saving._ended.wait()
    (again,) = chain(session, round_request, 1, save_state="now")
    assert "the trainer state cannot be saved" in caplog.text
    assert again.weights_digest == one.weights_digest and not again.reused
    assert checkpoint_damage(Path(again.checkpoint)) is None


def test_rows_that_changed_since_are_refused(session, round_request) -> None:
    _, two = chain(session, round_request, 2, save_state="later", save_interval=100)
    request = read_manifest(Path(two.checkpoint)).request
    (judged,) = request["judged"]
    table = pq.read_table(judged)
    column = table.schema.get_field_index("advantage")
    changed = table.set_column(column, "advantage", pc.add(table["advantage"], 1.0))
    pq.write_table(changed.cast(table.schema), judged)
    following = round_request(seed=3, parent=two.checkpoint, parent_version=two.policy_version)
    with pytest.raises(StorageError, match="its trainer state was not saved, and its training cannot be repeated"):
        train(TrainingSession(session.ranks, "float32"), following)
    Path(judged).unlink()
    with pytest.raises(StorageError, match=r"cannot be repeated: .*judge"):
        train(TrainingSession(session.ranks, "float32"), following)


def test_a_damaged_state_is_found(session, round_request) -> None:
    (one,) = chain(session, round_request, 1, save_state="later")
    session.close()
    file = Path(one.checkpoint, "trainer_state", "optimizer.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "optimizer.safetensors was changed after it was written" in (checkpoint_damage(Path(one.checkpoint)) or "")
    Path(one.checkpoint, SAVED_STATE).write_text("{")
    assert "saved.json cannot be read" in (checkpoint_damage(Path(one.checkpoint)) or "")
