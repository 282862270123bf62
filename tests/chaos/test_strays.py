"""Processes whose starter was killed before they came to hold their lease are found and ended."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from rft_platform.cluster.local.leases import (
    Lease,
    end_strays,
    lease_environment,
    leases_started_below,
    naming_starter,
    started_for,
    write_lease,
)
from rft_platform.config.home import Home

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def start_for(lease: Path) -> subprocess.Popen[str]:
    """A process as an engine's starter starts it; it never writes its lease."""
    process = subprocess.Popen(
        SLEEPER, env=os.environ | lease_environment(lease), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_strays_of_a_lease_are_ended_and_those_of_others_are_not(tmp_path):
    mine, other = tmp_path / "leases" / "engine.json", tmp_path / "leases" / "trainer.json"
    with start_for(mine) as first, start_for(mine) as second, start_for(other) as third:
        assert {process.pid for process in started_for(mine)} == {first.pid, second.pid}
        assert leases_started_below(tmp_path / "leases") == {mine, other}
        assert sorted(end_strays(mine)) == sorted([first.pid, second.pid])
        assert third.poll() is None
        third.kill()
    assert end_strays(mine) == []


def test_of_one_starter_only_its_own_strays_are_ended(tmp_path):
    home = Home(tmp_path)
    with start_for(home.leases / "engine.json") as holder, naming_starter() as starter:
        created = psutil.Process(holder.pid).create_time()
        lease = Lease("engine", holder.pid, created, "127.0.0.1", 1, "secret", "", 0.0, {})
        write_lease(home.leases / "engine.json", lease)
        with start_for(home.leases / "trainer.json") as stray:
            assert end_strays(home.leases / "trainer.json", starter="another") == []
            assert end_strays(home.leases / "trainer.json", starter=starter) == [stray.pid]
        assert holder.poll() is None
        assert home.cluster.stop_strays() == [holder.pid]
