"""A disk that is really full: said clearly, nothing half-written, and it goes on once there is room."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rft_platform.common.errors import DiskFullError
from rft_platform.common.files import atomic_path, write_json
from rft_platform.common.sqlite_files import damage_of_database, named_damage
from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.project import Project
from rft_platform.run.machine import database_findings

from .conftest import grown, round_rows


def test_a_write_that_finds_no_room_names_path_and_bytes_and_leaves_the_old_file(small_disk):
    disk = small_disk("1m")
    target = disk / "state.json"
    write_json(target, {"round": 1})
    with pytest.raises(DiskFullError) as told:
        write_json(target, {"rows": "x" * 2_000_000})
    message = str(told.value)
    assert str(target) in message
    assert "bytes written so far are needed" in message
    assert "free disk space" in message
    assert [file.name for file in disk.iterdir()] == ["state.json"]
    assert "round" in target.read_text()

    small_disk("8m")
    write_json(target, {"rows": "x" * 2_000_000})
    assert target.stat().st_size > 2_000_000


def test_the_error_names_the_bytes_that_a_folder_needs(small_disk):
    disk = small_disk("1m")
    with pytest.raises(DiskFullError, match="5,000,000 bytes are needed"), atomic_path(disk / "c", 5_000_000) as temp:
        temp.mkdir()
        (temp / "weights").write_bytes(bytes(5_000_000))
    assert list(disk.iterdir()) == []


def test_rows_that_find_no_room_have_not_landed(small_disk, project: Project):
    store = ExperienceStore(small_disk("256k") / "rounds")
    rows = [grown(row, 400_000) for row in round_rows(project)]
    with pytest.raises(DiskFullError, match=r"batch-0000\.parquet"):
        store.write_rollouts(1, 0, rows)
    assert store.batches(1) == []
    assert store.rollout_rows(1) == []

    small_disk("16m")
    store.write_rollouts(1, 0, rows)
    assert store.batches(1) == [0]
    assert len(store.rollout_rows(1)) == 4
    assert not list(Path(store.root).rglob("*.tmp"))


def test_a_database_on_a_full_disk_is_not_called_damaged(small_disk):
    """SQLite reports a full disk as an I/O error, like damage, whose remedy would throw the database away."""
    disk = small_disk("2m")
    file = disk / "dagster" / "runs.db"
    file.parent.mkdir()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE runs (id)")
        connection.commit()
    with suppress(OSError), (disk / "filled").open("wb", buffering=0) as filled:
        while filled.write(bytes(4096)):
            pass
    why = damage_of_database(file)
    assert why == "disk I/O error"
    message = named_damage(sqlite3.OperationalError(why), disk)
    assert "is full" in message
    assert "free disk space" in message
    assert "move" not in message
    assert [finding.level for finding in database_findings(Home(disk))] == ["error"]
    assert all("move" not in finding.text for finding in database_findings(Home(disk)))

    (disk / "filled").unlink()
    assert [finding.level for finding in database_findings(Home(disk))] == ["note"]
