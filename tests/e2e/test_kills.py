"""Real kills: whatever dies, the repeated work ends in the weights of the undisturbed run."""

import signal
import subprocess
import time

import psutil
import pytest
from safetensors.numpy import load_file

from rft_platform.cluster.local.leases import read_lease
from rft_platform.cluster.local.processes import wait_until_ended
from tests.support.builders import wait_until

pytestmark = pytest.mark.slow


def assert_equal_weights(project, reference) -> None:
    for number in (1, 2):
        ours, theirs = project.note(number, "policy"), reference.note(number, "policy")
        a, b = load_file(f"{ours['folder']}/model.safetensors"), load_file(f"{theirs['folder']}/model.safetensors")
        assert a.keys() == b.keys()
        for name, tensor in a.items():
            assert abs(tensor - b[name]).max() <= 1e-6, name


def test_a_terminated_run_ends_with_its_frozen_trainer(make_project):
    project = make_project("frozen")
    driver = subprocess.Popen(
        project.command("run", "--config", str(project.config)),
        env=project.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    judged, trainer = project.home / "rounds" / "r0001" / "judge.json", project.home / "leases" / "trainer.json"
    wait_until(lambda: judged.exists() and trainer.exists(), "round 1 was judged")
    leases = [lease for file in trainer.parent.glob("*.json") if (lease := read_lease(file)) is not None]
    started = [psutil.Process(lease.pid) for lease in leases]
    assert len(started) == 2  # engine and trainer
    stopped = read_lease(trainer)
    assert stopped is not None
    psutil.Process(stopped.pid).suspend()
    time.sleep(1)
    driver.terminate()
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130, output
    assert wait_until_ended(started, 20) == []


def test_killed_driver_and_trainer_lead_to_the_same_weights(make_project, finished):
    project = make_project("killed")
    started = project.home / "rounds" / "r0001" / "judge.json"
    driver = subprocess.Popen(
        project.command("run", "--config", str(project.config)),
        env=project.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(started.exists, "round 1 was judged")
    driver.send_signal(signal.SIGKILL)
    driver.wait()

    resumed = subprocess.Popen(
        project.command("run", "--config", str(project.config)),
        env=project.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    second = project.home / "rounds" / "r0002" / "judge.json"
    wait_until(second.exists, "round 2 was judged")
    lease = read_lease(project.home / "leases" / "trainer.json")
    assert lease is not None
    psutil.Process(lease.pid).kill()
    output, _ = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, output
    assert_equal_weights(project, finished)
