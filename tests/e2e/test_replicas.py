"""Two engine replicas through a whole run: they change who samples, not what is sampled."""

import subprocess
import time

import psutil
import pytest
from safetensors.numpy import load_file

from rft_platform.cluster.local.leases import leases_started_below, read_lease

pytestmark = pytest.mark.slow


def test_a_run_on_two_replicas_of_which_one_is_killed_ends_in_the_weights_of_a_run_on_one(make_project, finished):
    project = make_project("replicas", explorer={"rollout_model": {"engine_num": 2}})
    driver = subprocess.Popen(
        project.command("run", "--config", str(project.config)),
        env=project.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (project.home / "rounds" / "r0001" / "judge.json").exists():
        assert time.monotonic() < deadline and driver.poll() is None, "round 1 was never judged"
        time.sleep(0.01)
    lease = read_lease(project.home / "leases" / "engine-1.json")
    assert lease is not None
    psutil.Process(lease.pid).kill()
    output, _ = driver.communicate(timeout=200)
    assert driver.returncode == 0, output
    for number in (1, 2):
        ours, theirs = project.note(number, "policy"), finished.note(number, "policy")
        a, b = load_file(f"{ours['folder']}/model.safetensors"), load_file(f"{theirs['folder']}/model.safetensors")
        assert all(abs(tensor - b[name]).max() <= 1e-6 for name, tensor in a.items())
        assert project.note(number, "explore")["rows"] == 8 * 4
    assert leases_started_below(project.home / "leases") == set(), "a process outlived the run"
    assert list((project.home / "leases").glob("*.json")) == []
