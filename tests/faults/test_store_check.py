"""``rft store check`` and the phases find damage in checkpoints, notes and judgements, and name the right file."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from rft_platform.cli.main import app
from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import DamagedError, StorageError, TransientError
from rft_platform.common.files import SEAL, read_json, write_json, write_sealed_json
from rft_platform.experience.record import JudgedRow
from rft_platform.experience.selections import read_selection, selection_file, write_selection
from rft_platform.object_store.mirror import open_mirror
from rft_platform.rounds.maintenance.verification import check_judgements, verify
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RowSelection, publish, read, required, write
from rft_platform.rounds.project.repair import refuse_damaged_rows, repair_on_failure
from rft_platform.training.checkpoint.manifest import Manifest, describe_files, write_manifest
from tests.faults.conftest import round_rows

ROUNDS = 2


@pytest.fixture
def trained(project: Project) -> Project:
    """The project after two rounds: rows, two judgements each, notes and checkpoints."""
    store = project.store
    publish(store, Policy(str(project.home.root.parent / "base"), 0, "start", 0))
    for number in range(1, ROUNDS + 1):
        rows = round_rows(project, number)
        store.write_rollouts(number, 0, rows)
        for version in ("other", "used"):
            judged = [JudgedRow(r.row_id, r.group_id, r.run_id, 0, 1.0, {}, version, 0.5) for r in rows]
            store.write_judged(number, version, judged)
        write(store, number, Judged(sound=True, judge_version="used", mean_reward=0.5))
        folder = checkpoint(project, number)
        digest = write_checkpoint(folder, number)
        publish(store, Policy(str(folder), 2 * number, digest, number))
    return project


def checkpoint(project: Project, number: int) -> Path:
    return project.checkpoints / f"global_step_{2 * number}"


def write_checkpoint(folder: Path, number: int) -> str:
    (folder / "trainer_state").mkdir(parents=True)
    save_file({"weight": np.full(64, number, np.float32)}, folder / "model.safetensors")
    save_file({"moment": np.zeros(64, np.float32)}, folder / "trainer_state" / "optimizer.safetensors")
    (folder / "config.json").write_text("{}")
    manifest = Manifest(
        policy_version=2 * number, parent=str(folder.with_name(f"global_step_{2 * number - 2}")),
        parent_version=2 * number - 2, parent_digest="p", request_digest="r", weights_digest=digest_weights(folder),
        request={}, lineage={"round": number}, result={}, created_at=0.0, versions={}, dtype="float32",
        files=describe_files(folder),
    )  # fmt: skip
    write_manifest(folder, manifest)
    return manifest.weights_digest


def flip(path: Path, at: int = -20) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def change(path: Path, seal: bool | None = None, **values: object) -> None:
    """Edit a JSON document by hand: with its old digest (None), without any (False) or with a new one (True)."""
    content = read_json(path) | values
    if seal is None:
        write_json(path, content)
    elif seal:
        write_sealed_json(path, content)
    else:
        content.pop(SEAL)
        write_json(path, content)


def replaced_manifest(folder: Path) -> None:
    change(folder / "manifest.json", seal=True, weights_digest="of another training")


HARMS: dict[str, tuple[Callable[[Project], object], str, str]] = {
    "optimizer": (
        lambda p: flip(checkpoint(p, 2) / "trainer_state" / "optimizer.safetensors"),
        "global_step_4",
        "optimizer.safetensors was changed after it was written",
    ),
    "ancestor": (
        lambda p: flip(checkpoint(p, 1) / "model.safetensors"),
        "global_step_2",
        "model.safetensors was changed after it was written",
    ),
    "config": (lambda p: (checkpoint(p, 1) / "config.json").unlink(), "global_step_2", "config.json is missing"),
    "lineage": (
        lambda p: change(checkpoint(p, 2) / "manifest.json", lineage={"round": 7}),
        "global_step_4",
        "manifest.json was changed after it was written",
    ),
    "manifest cut": (
        lambda p: (checkpoint(p, 2) / "manifest.json").write_text("{"),
        "global_step_4",
        "manifest.json cannot be read",
    ),
    "no manifest": (
        lambda p: (checkpoint(p, 1) / "manifest.json").unlink(),
        "global_step_2",
        "manifest.json is missing",
    ),
    "other manifest": (
        lambda p: replaced_manifest(checkpoint(p, 2)),
        "manifest.json",
        "contradicts .*r0002/policy-policy.json",
    ),
    "note": (
        lambda p: change(p.store.round_folder(2) / "policy-policy.json", policy_version=7),
        "policy-policy.json",
        "was changed after it was written",
    ),
    "note without digest": (
        lambda p: change(p.store.round_folder(2) / "policy-policy.json", seal=False),
        "policy-policy.json",
        r"has no digest of its content",
    ),
    "version in a note": (
        lambda p: change(p.store.round_folder(2) / "policy-policy.json", seal=True, policy_version=7),
        "policy-policy.json",
        r"contradicts .*manifest.json: policy_version is 7, expected 4",
    ),
    "weights in a note": (
        lambda p: change(p.store.round_folder(2) / "policy-policy.json", seal=True, weights_digest="x"),
        "policy-policy.json",
        r"contradicts .*manifest.json: weights_digest is x, expected",
    ),
    "current cut": (lambda p: p.store.current_file(1).write_text("{"), "current.json", "judge the round again"),
    "current changed": (
        lambda p: change(p.store.current_file(1), judge_version="other"),
        "current.json",
        "was changed after it was written",
    ),
    "another judgement": (lambda p: p.store.put_in_force(1, "other"), "current.json", "judge.json names used"),
    "no judgement": (
        lambda p: p.store.current_file(2).unlink(),
        "current.json",
        "is missing, but judge.json names used",
    ),
    "a judgement that is not there": (
        lambda p: change(p.store.current_file(2), seal=True, judge_version="none"),
        "current.json",
        "none.parquet: named by current.json but missing",
    ),
    "ledger": (
        lambda p: change(p.store.ledger(1).path, superseded={"x": 1.0}),
        "files.json",
        "was changed after it was written",
    ),
    "judgement": (
        lambda p: flip(p.store.judged_file(2)),
        "used.parquet",
        "was changed after it was written|no readable footer",
    ),
}


@pytest.mark.parametrize("harm", HARMS, ids=str)
def test_the_check_names_what_is_damaged(trained: Project, harm: str) -> None:
    whole = verify(trained)
    assert (whole.damaged, whole.checkpoints) == ([], ROUNDS)
    act, name, why = HARMS[harm]
    act(trained)
    damaged = verify(trained).damaged
    assert [file.path.name for file in damaged] == [name], damaged
    assert re.search(why, damaged[0].why), damaged


def test_fast_compares_sizes(trained: Project) -> None:
    flip(checkpoint(trained, 2) / "model.safetensors")
    assert verify(trained, digest=False).damaged == []
    (checkpoint(trained, 1) / "model.safetensors").write_bytes(b"")
    assert [file.path for file in verify(trained, digest=False).damaged] == [checkpoint(trained, 1)]


def test_a_thinned_checkpoint_is_whole(trained: Project) -> None:
    folder = checkpoint(trained, 1)
    write_json(folder / "thinned.json", {})
    (folder / "model.safetensors").unlink()
    (folder / "trainer_state" / "optimizer.safetensors").unlink()
    assert verify(trained).damaged == []


def test_a_changed_note_is_refused_where_it_is_read(trained: Project) -> None:
    note = trained.store.round_folder(2) / "policy-policy.json"
    change(note, policy_version=7)
    with pytest.raises(DamagedError, match=rf"{note}: was changed after it was written"):
        required(trained.store, 2)


@pytest.mark.parametrize("values", [{"policy_version": 7}, {"weights_digest": "x"}], ids=str)
def test_a_note_that_contradicts_its_checkpoint_is_refused_before_the_weights_are_used(
    trained: Project, values: dict[str, object]
) -> None:
    note = trained.store.round_folder(2) / "policy-policy.json"
    change(note, seal=True, **values)
    with (
        pytest.raises(DamagedError, match=rf"{note}: contradicts .*restore the note"),
        repair_on_failure(trained, required(trained.store, 2)),
    ):
        pytest.fail("the weights were used")


def test_a_run_does_not_start_on_a_broken_judgement(trained: Project) -> None:
    check_judgements(trained.store)
    trained.store.current_file(1).write_text("{")
    with pytest.raises(DamagedError, match=r"r0001/judged/current.json: .*judge the round again"):
        check_judgements(trained.store)


def test_a_broken_current_file_can_be_quarantined(trained: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_HOME", str(trained.home.root))
    current = trained.store.current_file(1)
    current.write_text("{")
    assert CliRunner().invoke(app, ["store", "check", "--set-aside"]).exit_code == 1
    assert not current.exists()
    assert (trained.store.round_folder(1) / "aside" / "current.json").exists()


def test_damaged_files_of_a_round_are_restored_from_the_object_store(
    trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_HOME", str(trained.home.root))
    mirror = open_mirror(trained.home.root, f"file://{tmp_path}/bucket")
    mirror.take_over()
    mirror.commit()
    store = trained.store
    rows, judged, files = store.rollout_rows(1), store.read_judged(1), store.rollout_files(1)
    harmed = [*files, store.judged_file(1), store.round_folder(1) / "policy-policy.json"]
    for path in harmed:
        assert path is not None
        flip(path)
    done = CliRunner().invoke(app, ["store", "check", "--set-aside"])
    assert done.exit_code == 1 and done.stderr.count("restored from the object store") == len(harmed)
    assert not (store.round_folder(1) / "aside").exists() and verify(trained).damaged == []
    flip(files[0])
    mirror.commit()
    refuse_damaged_rows(store, 1, Judged)  # the stage goes on
    assert store.rollout_rows(1) == rows and store.read_judged(1) == judged


@pytest.mark.parametrize("with_copy", [False, True])
def test_a_file_that_an_error_names_is_repaired_by_the_command_that_the_error_names(
    with_copy: bool, trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_HOME", str(trained.home.root))
    store, folder = trained.store, trained.store.round_folder(2)
    write(store, 2, RowSelection(sha256=write_selection(store, 2, [])))
    write_sealed_json(folder / "explore.json", {"policy_version": "newest"})
    if with_copy:
        mirror = open_mirror(trained.home.root, f"file://{tmp_path}/bucket")
        mirror.take_over()
        mirror.commit()
    (selected := selection_file(store, 2)).write_bytes(b"PAR1")
    for reads in (lambda: read(store, 2).explored, lambda: read_selection(store, 2)):
        with pytest.raises(StorageError, match="`rft store check --set-aside`"):
            reads()
    done = CliRunner().invoke(app, ["store", "check", "--set-aside"])
    assert done.exit_code == 1 and "explore.json" in done.output and selected.name in done.output
    assert read(store, 2).explored is None and selected.exists() == with_copy
    if with_copy:
        assert read_selection(store, 2).num_rows == 0 and verify(trained).damaged == []
        mirror.take_over()
        assert read(store, 2).explored is None


def test_rows_are_not_set_aside_while_the_object_store_that_has_them_cannot_be_reached(
    trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = open_mirror(trained.home.root, f"file://{tmp_path}/bucket")
    mirror.take_over()
    mirror.commit()
    file = trained.store.rollout_files(1)[0]
    flip(file)

    def unreachable(_: object) -> None:
        raise TransientError("the store cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(mirror.remote, "download", unreachable)
        with pytest.raises(TransientError):
            refuse_damaged_rows(trained.store, 1, Judged)
    refuse_damaged_rows(trained.store, 1, Judged)
    assert trained.store.damaged(1, digest=True) == []
