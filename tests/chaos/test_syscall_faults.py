"""The errno injection library strikes what its rules name, and nothing else."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.syscall_faults import SyscallFault, injecting, injecting_from, rules, strikes

PROGRAM = """
import errno, fcntl, os, sqlite3, sys
from pathlib import Path
folder = Path(sys.argv[1])

def tried(action):
    try:
        action()
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]

def rename(name):
    (folder / "temp").write_text("x")
    os.replace(folder / "temp", folder / name)

def sync(name):
    with (folder / name).open("w") as stream:
        os.fsync(stream.fileno())

def lock(name):
    with (folder / name).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)

print(*(tried(lambda: rename("note.json")) for _ in range(4)), tried(lambda: rename("other.json")),
      tried(lambda: sync("a")), tried(lambda: lock("a")), tried(lambda: (folder / "new").mkdir()),
      tried(lambda: (folder / "a").read_text()))
"""


def run(fault_library: Path, folder: Path, *faults: SyscallFault) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **injecting(fault_library, faults, folder / "strikes.txt")}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_only_the_named_calls_fail(fault_library: Path, tmp_path: Path) -> None:
    done = run(fault_library, tmp_path, SyscallFault("rename", "EXDEV", path="note.json", nth=2, times=2))
    assert done.stdout.split() == ["ok", "EXDEV", "EXDEV", "ok", "ok", "ok", "ok", "ok", "ok"], done.stderr
    assert [call for _, call, _ in strikes(tmp_path / "strikes.txt")] == ["rename", "rename"]


def test_a_process_reads_the_rules_file_at_its_start(fault_library, tmp_path):
    file, command = tmp_path / "rules", [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = {**os.environ, **injecting_from(fault_library, file, tmp_path / "strikes.txt")}
    found = []
    for faults in ([], [SyscallFault("rename", "EIO", path="note.json")], [SyscallFault("flock", "ENOLCK")]):
        file.write_text(rules(faults))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        found.append([(index, name) for index, name in enumerate(done.stdout.split()) if name != "ok"])
        (tmp_path / "new").rmdir()
    assert found == [[], [(0, "EIO")], [(6, "ENOLCK")]]


def test_each_call_can_fail(fault_library: Path, tmp_path: Path) -> None:
    done = run(
        fault_library,
        tmp_path,
        SyscallFault("rename", "ESTALE", times=0, path="note.json"),
        SyscallFault("fsync", "EIO", path=str(tmp_path / "a")),
        SyscallFault("flock", "ENOLCK"),
        SyscallFault("mkdir", "ENOSPC", path="/new"),
        SyscallFault("read", "EIO", path=str(tmp_path / "a")),
    )
    assert done.stdout.split() == [*["ESTALE"] * 4, "ok", "EIO", "ENOLCK", "ENOSPC", "EIO"], done.stderr


@pytest.mark.parametrize(("after", "written"), [(False, False), (True, True)])
def test_a_signal_comes_before_or_after_the_call(
    fault_library: Path, tmp_path: Path, after: bool, written: bool
) -> None:
    done = run(fault_library, tmp_path, SyscallFault("rename", signal="SIGKILL", after=after, path="note.json"))
    assert done.returncode == -9
    assert (tmp_path / "note.json").exists() is written


def test_a_fault_is_injected_once_over_all_processes(fault_library: Path, tmp_path: Path) -> None:
    fault = SyscallFault("fsync", "EIO", path=str(tmp_path / "a"), once=tmp_path / "injections")
    outcomes = [run(fault_library, tmp_path, fault).stdout.split()[5] for _ in range(3)]
    assert outcomes == ["EIO", "ok", "ok"]


def test_a_fault_is_injected_only_into_the_named_process(fault_library: Path, tmp_path: Path) -> None:
    done = run(fault_library, tmp_path, SyscallFault("fsync", "EIO", process="another program"))
    assert done.stdout.split()[5] == "ok"


def test_bad_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="either an error or a signal"):
        SyscallFault("rename")
    with pytest.raises(ValueError, match="must not contain"):
        SyscallFault("rename", "EIO", path="a,b")
    assert SyscallFault("flock", "ENOLCK").rule() == f"call=flock,error={errno.ENOLCK},nth=1,times=1"
