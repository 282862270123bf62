"""Modes explore and train side by side: two processes on one home keep the order of a single one."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.config.home import Home
from rft_platform.jobs.driver_lock import driver_is_running, other_half_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def file_of(project: Any, mode: str) -> Path:
    """The project's configuration with this mode."""
    file: Path = project.config.with_name(f"{mode}.yaml")
    file.write_text(yaml.safe_dump({**yaml.safe_load(project.config.read_text()), "mode": mode}))
    return file


def started(project: Any, mode: str) -> subprocess.Popen[str]:
    """A driver of ``mode``, from its own configuration file."""
    file = file_of(project, mode)
    return subprocess.Popen(
        project.command("run", "--config", str(file)), env=project.environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for_half(home: Home, other: str, process: subprocess.Popen[str]) -> None:
    """Wait until the driver whose other half is ``other`` holds its lock."""
    while not other_half_runs(home, other):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


@pytest.mark.parametrize("style", ["fixed", "dynamic_by_explorer"])
def test_two_processes_on_one_home(make_project: Any, style: str) -> None:
    project = make_project(f"halves-{style}", synchronizer={"sync_style": style})
    home = Home(project.home)
    trainer = started(project, "train")
    wait_for_half(home, "explore", trainer)
    refused = project.rft("run", "--config", str(project.config), check=False)
    assert refused.returncode == 2 and "is driving" in refused.stderr
    other = project.rft("run", "--config", str(file_of(project, "explore")), "--rounds", "1", check=False)
    assert other.returncode == 2 and "runs with other values of buffer.total_steps" in other.stderr
    explorer = started(project, "explore")
    said = {"train": trainer.communicate(timeout=400)[0], "explore": explorer.communicate(timeout=60)[0]}
    assert (trainer.returncode, explorer.returncode) == (0, 0), said
    last = 2 if style == "fixed" or project.note(1, "row_selection")["landed"] < 2 else 1  # one training took all rows
    versions = [project.note(number, "policy")["policy_version"] for number in range(last + 1)]
    assert versions[0] == 0 and versions[-1] > versions[0]
    if style == "fixed":
        assert project.note(2, "snapshot")["policy_version"] == versions[1]  # explored after round 1 had trained
    else:
        selected = [project.note(number, "row_selection")["rows"] for number in range(1, last + 1)]
        assert sum(counts[use] for counts in selected for use in ("fresh", "filtered", "stale")) == sum(
            project.note(number, "explore")["rows"] for number in (1, 2)
        )
    assert not driver_is_running(home) and not home.cluster.leases()


@pytest.mark.parametrize(("mode", "other"), [("train", "explore"), ("explore", "train")])
def test_a_run_of_one_mode_fails_without_the_other_half(make_project: Any, mode: str, other: str) -> None:
    project = make_project(f"alone-{mode}", mode=mode, synchronizer={"sync_timeout": 2.0})
    ended = project.rft("run", "--config", str(project.config), check=False)
    assert ended.returncode != 0
    assert "no driver of the other half has run for 2 s (synchronizer.sync_timeout)" in ended.stderr
    assert f"start `rft run` with mode {other}" in ended.stderr
