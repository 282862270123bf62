"""Retired rows are gone or archived; what they were, and what was made of them, stays known."""

from pathlib import Path

import pytest

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import digest_file
from rft_platform.experience.maintenance import compact_round, retire_round, sweep_round
from rft_platform.experience.queries import connect, mean_reward_by_round
from rft_platform.experience.store import ExperienceStore

from .samples import judged, rollouts


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    made = ExperienceStore(tmp_path / "rounds")
    for batch in range(2):
        made.write_rollouts(1, batch, rollouts(batch=batch))
    made.write_judged(1, "exact@1", judged(made.rollout_rows(1)))
    return made


def test_retiring_removes_rollouts_and_keeps_the_rest(store: ExperienceStore) -> None:
    digest, files = store.digest(1), store.rollout_files(1)
    assert retire_round(store, 1, dry_run=True) is not None and store.count_rollouts(1) == 8
    done = retire_round(store, 1)
    assert done is not None and (done.rows, done.archived_to) == (8, None)
    assert (store.count_rollouts(1), store.count_judged(1), store.digest(1)) == (0, 8, digest)
    assert store.damaged(1, digest=True) == []
    with pytest.raises(StorageError, match=r"8 rollout rows were retired on 20\d\d-\d\d-\d\d: they were deleted"):
        store.read_rollouts(1)
    with pytest.raises(StorageError, match="rollouts were retired"):
        store.write_rollouts(1, 0, rollouts())
    assert sweep_round(store, 1, grace_s=0) > 0 and not any(file.exists() for file in files)
    assert retire_round(store, 1) is None
    assert mean_reward_by_round(connect(store)) == [
        {"round": 1, "runs": 8, "mean_reward": 0.5, "std_reward": pytest.approx(0.5345, abs=1e-4)}
    ]


def test_archived_rollouts_are_copied_first(store: ExperienceStore, tmp_path: Path) -> None:
    compact_round(store, 1)
    (path,) = store.rollout_files(1)
    sha256, digest = digest_file(path), store.digest(1)
    done = retire_round(store, 1, archive=tmp_path / "archive")
    copy = tmp_path / "archive" / "r0001" / "rollouts" / path.name
    assert done is not None and done.archived_to == str(copy.parent.parent)
    assert digest_file(copy) == sha256 and store.digest(1) == digest
    assert str(copy.parent) in store.ledger(1).read().retirement(store.home)


def test_an_archive_that_holds_another_projects_rows_is_refused(store: ExperienceStore, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    other = ExperienceStore(tmp_path / "other")
    other.write_rollouts(1, 0, rollouts(policy_version=7))
    retire_round(other, 1, archive=archive)
    copy, source = archive / "r0001" / "rollouts" / "batch-0000.parquet", store.rollout_files(1)[0]
    before = digest_file(copy)
    with pytest.raises(StorageError, match="a separate archive folder") as told:
        retire_round(store, 1, archive=archive)
    assert str(copy) in str(told.value) and str(source) in str(told.value)
    assert digest_file(copy) == before and store.count_rollouts(1) == 8


def test_an_archive_that_is_part_of_the_store_is_refused(store: ExperienceStore, tmp_path: Path) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(store.root)
    other.mkdir()
    (other / "r0001").symlink_to(store.round_folder(1))
    for archive in (store.root, store.root / "archive", link, other):
        with pytest.raises(UserError, match="give --archive a folder outside it"):
            retire_round(store, 1, archive=archive)
    with pytest.raises(UserError, match="is part of the store"):
        retire_round(store, 1, archive=store.root, dry_run=True)
    assert sweep_round(store, 1, grace_s=0) == 0 and store.read_rollouts(1).num_rows == 8


def test_archiving_continues_after_a_kill(store: ExperienceStore, tmp_path: Path) -> None:
    copy = tmp_path / "archive" / "r0001" / "rollouts" / "batch-0000.parquet"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(store.rollout_files(1)[0].read_bytes())
    done = retire_round(store, 1, archive=tmp_path / "archive")
    assert done is not None and done.rows == 8 and copy.with_name("batch-0001.parquet").exists()


def test_what_was_damaged_is_not_retired_into_an_archive(store: ExperienceStore, tmp_path: Path) -> None:
    path = store.rollout_files(1)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(StorageError, match=r"batch-0000\.parquet: was changed after it was written"):
        retire_round(store, 1, archive=tmp_path / "archive")
    assert store.count_rollouts(1) == 8
