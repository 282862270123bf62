"""A lease counts only in the folder it was written in and for the process that was started for it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft_platform.cluster.local.leases import (
    Lease,
    holder,
    lease_environment,
    naming_starter,
    read_lease,
    stop_holder,
    write_lease,
)
from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import TransientError
from rft_platform.config.home import Home

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def started(env: dict[str, str]) -> "subprocess.Popen[str]":
    process = subprocess.Popen(SLEEPER, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.leases.mkdir(parents=True)
    return home


@pytest.fixture
def engine(home: Home) -> Iterator["subprocess.Popen[str]"]:
    """A process that was started for the home's engine, and holds its lease."""
    lease = home.leases / "engine.json"
    with started(os.environ | lease_environment(lease)) as process:
        write_lease(lease, lease_of(process.pid))
        yield process
        process.kill()


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[str]"]:
    """A process that has nothing to do with any home."""
    with started({name: value for name, value in os.environ.items() if name != "RFT_LEASE"}) as process:
        yield process
        process.kill()


def lease_of(pid: int) -> Lease:
    created = psutil.Process(pid).create_time()
    return Lease("engine", pid, created, "127.0.0.1", 1, "secret", "m", created, {})


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in document.items() if value != "absent"}))


def test_a_copied_home_neither_uses_nor_ends_the_originals_processes(home, engine, tmp_path):
    copied = Home(tmp_path / "copied")
    shutil.copytree(home.root, copied.root, copy_function=shutil.copy2)
    assert read_lease(copied.leases / "engine.json") is None
    assert not copied.cluster.leases()
    assert copied.cluster.stop_strays() == []
    assert engine.poll() is None
    (held,) = home.cluster.leases().values()
    assert held.alive


def test_a_moved_home_keeps_its_processes(home, engine, tmp_path):
    moved = Home(tmp_path / "moved")
    home.root.rename(moved.root)
    (held,) = moved.cluster.leases().values()
    assert held.alive
    assert moved.cluster.stop("engine", 10.0)
    assert not psutil.pid_exists(engine.pid)


def test_a_lease_that_names_a_stranger_neither_trusts_nor_ends_it(home, stranger):
    path = home.leases / "engine.json"
    write_lease(path, lease_of(stranger.pid))
    (held,) = home.cluster.leases().values()
    assert not held.alive
    assert not home.cluster.stop("engine", 10.0)
    assert stranger.poll() is None
    assert not path.exists()


def test_a_launcher_that_is_not_the_holders_parent_is_left_alone(home, engine, stranger):
    edit(home.leases / "engine.json", details={"launcher": stranger.pid})
    assert home.cluster.stop("engine", 10.0)
    assert stranger.poll() is None
    assert not psutil.pid_exists(engine.pid)


def test_setting_the_clock_neither_loses_nor_forges_a_lease(home, engine, stranger):
    path = home.leases / "engine.json"
    edit(path, create_time=lease_of(engine.pid).create_time + 30)
    assert home.cluster.leases()["engine"].alive
    edit(path, pid=stranger.pid, create_time=lease_of(stranger.pid).create_time + 30)
    lease = home.cluster.leases()["engine"]
    assert holder(lease) is None
    assert not stop_holder(lease)
    assert stranger.poll() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": -1}, {"pid": 0}, {"pid": "12"}, {"pid": 1.5}, {"pid": True}, {"pid": 2**40}, {"pid": None},
        {"create_time": "yesterday"}, {"create_time": None}, {"create_time": float("nan")}, {"port": 10**6},
        {"port": "80"}, {"host": 7}, {"token": None}, {"details": []}, {"started_at": "now"}, {"start_ticks": "many"},
        {"folder": "absent"}, {"folder": {}}, {"folder": "here"}, {"folder": {"path": 7, "device": 1, "inode": 1}},
        {"more": 1}, {"digest": 5}, {"generation": "two"}, {"kind": None}, {"started_by": 7},
    ],
)  # fmt: skip
def test_a_lease_with_values_of_wrong_types_counts_as_none(home, engine, changes):
    edit(home.leases / "engine.json", **changes)
    assert read_lease(home.leases / "engine.json") is None
    assert not home.cluster.leases()
    assert engine.poll() is None


def test_a_lease_names_the_command_that_started_its_process(home, engine):
    path = home.leases / "engine.json"
    assert home.cluster.leases()["engine"].started_by is None
    with naming_starter() as starter:
        write_lease(path, lease_of(engine.pid))
    assert home.cluster.leases()["engine"].started_by == starter


def test_a_deeply_nested_lease_counts_as_none(home):
    (home.leases / "engine.json").write_text("[" * 100_000)
    assert read_lease(home.leases / "engine.json") is None


def test_a_stopped_process_ends_in_order(home, tmp_path):
    code = (
        "import pathlib, signal, sys\n"
        "def end(*_):\n    pathlib.Path(sys.argv[1]).write_text('ended in order')\n    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\nsignal.pause()"
    )
    lease = home.leases / "engine.json"
    command = [sys.executable, "-c", code, str(tmp_path / "said")]
    env = os.environ | lease_environment(lease)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        write_lease(lease, lease_of(process.pid))
        psutil.Process(process.pid).suspend()
        assert home.cluster.stop("engine", 10.0)
    assert (tmp_path / "said").read_text() == "ended in order"


@pytest.mark.slow
def test_a_lock_that_a_stopped_process_holds_is_waited_for_with_a_limit(tmp_path):
    path = tmp_path / "trainer.json"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom rft_platform.cluster.local.locks import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        psutil.Process(process.pid).suspend()
        began = time.monotonic()
        with pytest.raises(TransientError, match=f"held by process {process.pid} for 1 s"), locked(path, 1):
            pass
        assert time.monotonic() - began < 10
        process.kill()
    with locked(path, 1):
        pass
