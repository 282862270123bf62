"""What has landed is known by its digest; what is damaged is named, set aside and produced again."""

import errno
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.common.errors import StorageError
from rft_platform.common.files import digest_file, digest_json, read_json, read_sealed_json
from rft_platform.experience.file_ledger import LEDGER, Ledger
from rft_platform.experience.integrity import DamagedFile
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.record import Explored, Judged, Policy, read, set_aside, withdraw, write

from .samples import judged, rollouts

BATCH = "rollouts/batch-0000.parquet"


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    """A store with one explored and judged round, as its phases leave it."""
    made = ExperienceStore(tmp_path / "rounds")
    made.write_rollouts(1, 0, rollouts())
    write(made, 1, Explored(rows=4))
    made.write_judged(1, "exact@1", judged(rollouts()))
    write(made, 1, Judged(sound=True))
    return made


def file_of(store: ExperienceStore) -> Path:
    return store.round_folder(1) / BATCH


def test_the_ledger_holds_digest_rows_and_size(store: ExperienceStore) -> None:
    path = file_of(store)
    entry = store.entry(1, path)
    assert (entry.sha256, entry.rows, entry.bytes) == (digest_file(path), 4, path.stat().st_size)
    files = [*store.rollout_files(1), store.judged_file(1)]
    assert store.digest(1) == digest_json([digest_file(file) for file in files if file])
    assert store.digest(1, verify=True) == store.digest(1)


def test_the_ledger_counts_the_rows_that_a_filter_kept(store: ExperienceStore) -> None:
    judgements = judged(rollouts())
    judgements[0].dropped_by = "zero_variance"
    judgements[1].dropped_by, judgements[1].masked = "truncated_mask", True
    entry = store.entry(1, store.write_judged(1, "exact@1", judgements))
    assert (entry.rows, entry.kept, entry.masked) == (4, 2, 1)


def test_a_file_that_cannot_be_put_in_place_leaves_the_one_before(
    store: ExperienceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def fail_for_rollouts(self: Path, target: Path) -> Path:
        if target == file_of(store):
            raise OSError(errno.EIO, "Input/output error", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_for_rollouts)
    with pytest.raises(OSError, match="Input/output"):
        store.write_rollouts(1, 0, rollouts(policy_version=5))
    assert {row.policy_version for row in store.rollout_rows(1)} == {4} and store.damaged(1, digest=True) == []


def test_a_change_that_fails_is_not_saved(store: ExperienceStore) -> None:
    with pytest.raises(StorageError, match="the disk"), Ledger(store.round_folder(1)).change() as contents:
        del contents.files[BATCH]
        raise StorageError("the disk is gone")
    assert store.batches(1) == [0] and store.damaged(1, digest=True) == []


def test_a_file_that_is_not_in_the_ledger_has_not_landed(store: ExperienceStore) -> None:
    late = rollouts(batch=1)
    other = ExperienceStore(store.root.parent / "other")
    other.write_rollouts(1, 1, late).rename(file_of(store).with_name("batch-0001.parquet"))
    assert (store.batches(1), store.count_rollouts(1), len(store.rollout_rows(1))) == ([0], 4, 4)
    store.write_rollouts(1, 1, late)  # the repeated phase replaces it
    assert (store.batches(1), store.count_rollouts(1)) == ([0, 1], 8)


def test_a_crash_while_replacing_never_leaves_new_bytes_under_an_old_digest(
    store: ExperienceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    saves: list[int] = []
    save = Ledger.save

    def dies_at_the_second_save(self: Ledger, contents: object) -> None:
        saves.append(1)
        if len(saves) >= 2:
            raise Killed
        save(self, contents)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "save", dies_at_the_second_save)
    with pytest.raises(Killed):
        store.write_rollouts(1, 0, rollouts(policy_version=5))
    monkeypatch.undo()
    assert file_of(store).exists() and store.batches(1) == []
    store.write_rollouts(1, 0, rollouts(policy_version=5))
    assert {row.policy_version for row in store.rollout_rows(1)} == {5} and store.damaged(1, digest=True) == []


def test_rounds_from_before_the_ledger_are_adopted(store: ExperienceStore) -> None:
    before = store.digest(1)
    (store.round_folder(1) / LEDGER).unlink()
    assert store.count_rollouts(1) == 4 and store.digest(1) == before
    assert read_json(store.round_folder(1) / LEDGER)["files"][BATCH]["rows"] == 4
    assert store.rollout_files(2) == [] and not store.round_folder(2).exists()  # reading makes nothing


def test_an_intact_store_reports_no_damage(store: ExperienceStore) -> None:
    assert store.damaged(1, digest=True) == store.damaged(2, digest=True) == []
    store.check(1, digest=True)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 8] ^= 1  # among the rows, not in the footer
    path.write_bytes(content)


def break_the_footer(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"XXXX")


@pytest.mark.parametrize(
    ("harm", "digest", "why"),
    [
        (Path.unlink, False, "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), False, "bytes long"),
        (break_the_footer, False, "no readable footer"),
        (flip_a_byte, True, "was changed after"),
    ],
    ids=["missing", "truncated", "footer", "flipped"],
)
@pytest.mark.parametrize("kind", ["rollouts", "judged"])
def test_the_error_names_the_damage(
    store: ExperienceStore, kind: str, harm: Callable[[Path], None], digest: bool, why: str
) -> None:
    (path,) = (store.round_folder(1) / kind).glob("*.parquet")
    harm(path)
    (found,) = store.damaged(1, digest=digest)
    assert found.path == path and why in found.why
    with pytest.raises(StorageError, match=path.name):
        store.check(1, digest=digest)


def test_a_flipped_byte_needs_the_digest(store: ExperienceStore) -> None:
    flip_a_byte(file_of(store))
    assert store.damaged(1, digest=False) == []
    with pytest.raises(StorageError, match="was changed after"):
        store.digest(1, verify=True)


def test_quarantine_removes_a_file_and_the_notes_that_depend_on_it(store: ExperienceStore) -> None:
    where = set_aside(store, 1, DamagedFile(file_of(store), "was changed after it was written"))
    assert where == store.round_folder(1) / "aside" / "batch-0000.parquet" and where.exists()
    reason = read_json(where.with_name(where.name + ".why.json"))
    assert (reason["file"], reason["why"]) == (BATCH, "was changed after it was written")
    assert (store.batches(1), read(store, 1).explored, read(store, 1).judged) == ([], None, None)
    assert store.judge_version(1) is None and store.damaged(1, digest=True) == []
    store.write_rollouts(1, 0, rollouts())
    again = set_aside(store, 1, DamagedFile(file_of(store), "once more"))
    assert again != where and again.exists() and where.exists()


def test_quarantine_of_a_judgement_keeps_the_rollouts(store: ExperienceStore) -> None:
    store.write_judged(1, "other", judged(rollouts(), "other"), make_current=False)
    spare = store.judged_file(1, "other")
    assert spare is not None
    set_aside(store, 1, DamagedFile(spare, "why not"))
    assert read(store, 1).judged and store.judge_version(1) == "exact@1"  # the one in force is untouched
    path = store.judged_file(1)
    assert path is not None
    path.unlink()
    set_aside(store, 1, DamagedFile(path, "is missing"))
    assert (read(store, 1).judged, store.judged_file(1), store.batches(1)) == (None, None, [0])
    assert read(store, 1).explored == Explored(rows=4)


def test_a_kill_during_quarantine_leaves_no_dependent_note(
    store: ExperienceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    unlink = Path.unlink

    def dies_after_current(self: Path, missing_ok: bool = False) -> None:
        unlink(self, missing_ok)
        if self.name == "current.json":
            raise Killed

    path = store.judged_file(1)
    assert path is not None
    flip_a_byte(path)
    monkeypatch.setattr(Path, "unlink", dies_after_current)
    with pytest.raises(Killed):
        set_aside(store, 1, DamagedFile(path, "was changed after it was written"))
    monkeypatch.undo()
    assert not read(store, 1).has(Judged) and store.judge_version(1) is None
    set_aside(store, 1, DamagedFile(path, "was changed after it was written"))  # the repeat
    assert store.judged_files(1) == [] and not read(store, 1).has(Judged) and read(store, 1).has(Explored)


def test_a_round_that_trained_keeps_its_notes(store: ExperienceStore) -> None:
    write(store, 1, Policy("f", 4, "digest", round=1))
    set_aside(store, 1, DamagedFile(file_of(store), "gone bad"))
    assert read(store, 1).explored and read(store, 1).judged and store.batches(1) == []


def test_a_broken_ledger_is_reported_and_rebuilt(store: ExperienceStore) -> None:
    path = store.round_folder(1) / LEDGER
    path.write_text('{"format": 1, "files": {')
    (found,) = store.damaged(1, digest=False)
    assert found.path == path
    with pytest.raises(StorageError, match=r"files\.json"):
        store.rollout_files(1)
    set_aside(store, 1, DamagedFile(path, found.why))
    assert store.count_rollouts(1) == 4 and store.damaged(1, digest=True) == []


def test_a_withdrawn_note_is_kept_in_quarantine(store: ExperienceStore) -> None:
    withdraw(store, 1, Judged)
    assert read_sealed_json(store.round_folder(1) / "aside" / "judge.json")["sound"]
    assert not read(store, 1).has(Judged) and read(store, 1).has(Explored)
    withdraw(store, 1, Judged)  # nothing is left to withdraw


def write_batches(root: Path, batches: range) -> None:
    store = ExperienceStore(root)
    for batch in batches:
        store.write_rollouts(1, batch, rollouts(1, 1, batch=batch))
        store.write_judged(1, f"judge-{batch}", judged(rollouts(), f"judge-{batch}"))


@pytest.mark.slow
def test_writers_of_one_round_do_not_lose_each_others_files(store: ExperienceStore) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [
        spawn.Process(target=write_batches, args=(store.root, range(start, 13, 2)), daemon=True) for start in (1, 2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert store.batches(1) == list(range(13))
    assert len(store.judged_files(1)) == 13 and store.damaged(1, digest=True) == []
