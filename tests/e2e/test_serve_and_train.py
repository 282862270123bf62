"""Service and training as two commands on one home: traffic of the one is trained by the other, and served again."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from rft_platform.cluster.local.processes import wait_until_ended
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.online.project import open_project
from rft_platform.online.traffic.database import CONSUMED
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.recipes.recipe import recipe_named
from tests.support.ports import free_port
from tests.support.recipe_projects import modules_of

(customers_of,) = modules_of("front-desk", "customers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RFT = [sys.executable, "-P", "-m", "rft_platform"]
_START_S, _UPDATE_S = 300.0, 400.0


class Halves:
    """The files and the commands of both halves."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.environment = {
            **os.environ, "RFT_HOME": str(self.home.root), "RFT_SENSOR_INTERVAL_S": "1", "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }  # fmt: skip
        project = folder / "project"
        recipe_named("front-desk").write(project)
        recipe = yaml.safe_load((project / "rft.yaml").read_text())
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        same = {name: recipe[name] for name in ("project", "name", "model", "algorithm")}
        buffer = {"trainer_input": recipe["buffer"]["trainer_input"]}
        self.files = {"serve": project / "explorer.yaml", "train": project / "trainer.yaml"}
        serve = {"mode": "serve", **same, "buffer": {**buffer, "train_batch_size": 16}}
        serve["explorer"] = {"proxy_port": self.port}
        train = {**recipe, "mode": "train", "synchronizer": {"sync_interval": 2}}
        for mode, config in (("serve", serve), ("train", train)):
            self.files[mode].write_text(yaml.safe_dump(config))
        self.logs = {mode: folder / f"{mode}.log" for mode in self.files}

    def command(self, mode: str) -> list[str]:
        ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())] if mode == "train" else []
        return [*RFT, "serve", "--config", str(self.files[mode]), *ports]

    @contextmanager
    def running(self, mode: str) -> Iterator["subprocess.Popen[bytes]"]:
        with self.logs[mode].open("a") as output:
            process = subprocess.Popen(
                self.command(mode), env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)

    def said(self, mode: str) -> str:
        return self.logs[mode].read_text()


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Halves]:
    made = Halves(tmp_path)
    yield made
    subprocess.run([*RFT, "stop"], env=made.environment, timeout=60, check=True)


def wait_until(is_so: Callable[[], Any], seconds: float, halves: Halves) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        logs = "\n".join(halves.said(mode) for mode in halves.logs if halves.logs[mode].exists())
        assert time.monotonic() < deadline, logs
        time.sleep(0.5)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=5).is_success
    except httpx.HTTPError:
        return False


def kill_with_children(command: "subprocess.Popen[bytes]") -> None:
    """Kill a command and the servers that it has started."""
    family = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
    for process in family:
        process.kill()
    command.wait(30)
    assert wait_until_ended(family[1:], 30) == []


def newest(customers: Any) -> int:
    return max(customers.tally.right, default=0)


def test_a_service_and_a_training_share_one_home(halves: Halves) -> None:
    with halves.running("serve") as service:
        wait_until(lambda: answers(halves.url), _START_S, halves)
        with halves.running("train") as training:
            start = halves.home.rounds / "r0000" / "evaluation.json"
            wait_until(lambda: start.exists() or training.poll() is not None, _START_S, halves)
            again = subprocess.run(halves.command("train"), env=halves.environment, capture_output=True, text=True)
            assert again.returncode == 2 and "`rft ui` or `rft serve` of" in again.stderr
            customers = customers_of.Customers(halves.url, customers_of.Habits(seed=1))
            try:
                wait_until(lambda: newest(customers) >= 2, _UPDATE_S, halves)
                kill_with_children(training)
                first = newest(customers)
                with halves.running("train"):
                    wait_until(lambda: newest(customers) > first, _UPDATE_S, halves)
            finally:
                customers.stop()
        assert service.poll() is None
    assert customers.tally.failures == []
    config = load_config_of(halves.home)
    assert (config.mode, config.buffer.train_batch_size, config.explorer.proxy_port) == ("both", 64, halves.port)
    assert "train_batch_size" not in halves.said("serve"), "the service started first"
    calls = traffic_store(open_project(halves.home)).calls(customers.tally.rated)
    consumed = [call for call in calls if call.state == CONSUMED]
    assert len(consumed) >= 256 and len({call.batch for call in consumed}) >= 2
