"""Every error has its place, and what the platform did not raise itself is given one."""

import errno
import sqlite3
from pathlib import Path
from typing import get_args

import pytest

from rft_platform.common import errors
from rft_platform.common.errors import (
    DiskFullError,
    EngineError,
    Fault,
    FileSystemDownError,
    FileSystemError,
    OutOfMemoryError,
    RftError,
    StorageError,
    TransientError,
    UserCodeError,
)
from rft_platform.common.fault_classification import CAUSE_CHARACTERS, as_fault, cause_line
from rft_platform.common.files import read_json

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RftError)]


def caught(raise_it) -> Exception:
    with pytest.raises(Exception) as found:
        raise_it()
    return found.value


@pytest.mark.parametrize("kind", ALL)
def test_every_error_names_its_fault_and_what_to_do(kind: type[RftError]):
    assert kind.fault in get_args(Fault)
    assert kind.hint
    assert kind.__doc__


def test_every_fault_has_an_error():
    assert {kind.fault for kind in ALL} == set(get_args(Fault))


def test_the_platforms_own_errors_stay_as_they_are():
    error = EngineError("gone")
    assert as_fault(error) is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/rows.parquet"), DiskFullError),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/x/rows.parquet"), DiskFullError),
        (sqlite3.OperationalError("database or disk is full"), DiskFullError),
        (RuntimeError("I/O error: No space left on device (os error 28)"), DiskFullError),
        (OSError(errno.EIO, "Input/output error", "/x/policy-policy.json"), FileSystemDownError),
        (OSError(errno.ESTALE, "Stale file handle", "/x/policy-policy.json"), FileSystemDownError),
        (OSError(errno.EXDEV, "Invalid cross-device link", "/x/a", None, "/x/b"), FileSystemError),
        (OSError(errno.ENOLCK, "No locks available", "/x/driver.lock"), FileSystemError),
        (sqlite3.DatabaseError("database disk image is malformed"), StorageError),
        (sqlite3.OperationalError("database is locked"), TransientError),
        (ConnectionResetError("peer went away"), TransientError),
        (MemoryError(), OutOfMemoryError),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfMemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), OutOfMemoryError),
    ],
)
def test_known_environment_failures_are_classified(error: Exception, kind: type[RftError]):
    found = as_fault(error)
    assert type(found) is kind
    assert found.__cause__ is error


def test_a_full_disk_names_the_path():
    assert "/x/rows.parquet" in str(as_fault(OSError(errno.ENOSPC, "No space left on device", "/x/rows.parquet")))


def test_what_user_code_raises_is_its_fault_at_its_line():
    def workflow() -> None:
        raise KeyError("answer")

    error = caught(workflow)
    found = as_fault(error)
    assert type(found) is UserCodeError
    line = error.__traceback__.tb_next.tb_lineno
    assert f"{__file__}:{line}" in str(found)


def test_a_chained_user_error_has_its_location():
    def judge() -> None:
        raise ValueError("no digits")

    try:
        try:
            judge()
        except ValueError as error:
            raise UserCodeError("the judge failed on all 8 runs") from error
    except UserCodeError as error:
        assert f"{__file__}:" in cause_line(error)


def test_an_unexpected_error_is_the_platforms_fault_and_names_its_place():
    error = caught(lambda: read_json(Path("/nowhere/at/all.json")))
    # the test itself is no part of what a run would have on its stack
    error.__traceback__ = error.__traceback__.tb_next.tb_next
    found = as_fault(error)
    assert found.fault == "orchestration"
    assert not found.retryable
    assert "files.py:" in str(found)


def test_a_cause_is_one_short_line():
    error = EngineError("\n  the engine ended. Last lines:\n  more\n" + "x" * 1000)
    assert cause_line(error) == "the engine ended. Last lines:"
    assert len(cause_line(EngineError("y" * 1000))) == CAUSE_CHARACTERS
