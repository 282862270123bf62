"""Rounds without a saved trainer state: a killed trainer repeats them from the stored rows, to the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from rft_platform.cluster.local.leases import read_lease
from rft_platform.cluster.local.processes import wait_until_ended
from rft_platform.common.digests import SAVED_STATE, lacks_state

pytestmark = pytest.mark.slow

DRIVE = """
import sys
from rft_platform.definitions import defs
from rft_platform.run.start import write_config
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.run.driver import drive
from rft_platform.rounds.project.project import Project
home = Home.from_environment()
write_config(home, load_config(sys.argv[1]))
drive(Project.open(home), defs, max_launches=int(sys.argv[2]))
"""


def drive(project, launches: int) -> None:
    command = [sys.executable, "-c", DRIVE, str(project.config), str(launches)]
    done = subprocess.run(command, env=project.environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def folder(project, number: int) -> Path:
    return Path(project.note(number, "policy")["folder"])


def test_a_trainer_killed_after_three_unsaved_rounds_repeats_the_same_weights(make_project) -> None:
    straight = make_project("straight")
    skipping = make_project("skipping")
    for project, trainer in ((straight, {"save_in_background": False}), (skipping, {"save_interval": 1000})):
        text = project.config.read_text().replace("total_steps: 2", "total_steps: 4")
        project.config.write_text(text + f"trainer: {json.dumps(trainer)}\n")
    straight.rft("run", "--config", str(straight.config))

    drive(skipping, 7)  # the start, and two launches for each of three rounds
    assert (skipping.home / "rounds" / "r0003" / "evaluation.json").exists()
    assert not (skipping.home / "rounds" / "r0004" / "train-policy.json").exists()
    assert all(lacks_state(folder(skipping, number)) for number in (1, 2, 3))
    lease = read_lease(skipping.home / "leases" / "trainer.json")
    assert lease is not None
    trainer = psutil.Process(lease.pid)
    trainer.kill()
    assert wait_until_ended([trainer], 10) == []
    continued = skipping.rft("run", "--config", str(skipping.config))

    assert "r0004 training: repeats 6 steps of 3 earlier trainings" in continued.stdout + continued.stderr
    log = (skipping.home / "logs" / "trainer.log").read_text()
    assert log.count("repeating its training") == 3 and "weights of the repeated training differ" not in log
    for number in range(1, 5):
        assert skipping.note(number, "policy")["weights_digest"] == straight.note(number, "policy")["weights_digest"]
    ends = [folder(project, 4) / "trainer_state" / "optimizer.safetensors" for project in (skipping, straight)]
    moments, others = (load_file(end) for end in ends)
    assert moments.keys() == others.keys() and all((moments[name] == others[name]).all() for name in moments)
    assert not (folder(skipping, 4) / SAVED_STATE).exists()  # the last round saves its state with its weights
    assert skipping.rft("store", "check").returncode == 0
