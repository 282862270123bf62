"""Releases in the real service: processes of the service and its engines, versions by CLI and HTTP, live clients."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rft_platform.cli.main import app
from rft_platform.common.digests import digest_weights
from rft_platform.config.home import Home
from rft_platform.online.project import open_project
from rft_platform.online.releases.shared_place import EXCHANGE_KEY
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, write
from rft_platform.tasks.offline_dataset import Columns, load_pairs

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is 12*7?"}]


def changed(model: Path, folder: Path, factor: float) -> Path:
    """A copy of the model with other weights."""
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors"):
        weights = {name: tensor * factor for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    return folder


class RunningService:
    """The service's process, for a project with the versions 0, 1 and 2; 2 has damaged files."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = {
            "project": "shop", "name": "helper", "mode": "serve", "checkpoint_root_dir": str(folder / "checkpoints"),
            "model": {"model_path": str(model), "max_model_len": 512, "max_response_tokens": 8},
            "algorithm": {"algorithm_type": "ppo"},
            "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
            "explorer": {"proxy_port": port},
            "engine": {"device": "cpu", "dtype": "float32"},
            "service": {
                "redaction": f"{folder / 'privacy.py'}:redact", "requests_per_minute": 100_000, "subject_share": 0.5,
                "metrics": [{"name": "helpful", "min": 1, "max": 5}], "alerts": {"least_calls": 1, "label_rate": 1.0},
                "implicit_feedback": {"base_url": "http://127.0.0.1:9/v1", "model": "grader"},
            },
        }  # fmt: skip
        (folder / "privacy.py").write_text("def redact(text):\n    return text.replace('Mrs Quillfeather', '[name]')\n")
        self.home, self.url = folder / "home", f"http://127.0.0.1:{port}"
        self.home.mkdir(mode=0o700)
        (self.home / "rft.yaml").write_text(yaml.safe_dump(config))
        self.project = open_project(Home(self.home))
        for version, weights in enumerate((model, *(changed(model, folder / f"v{n}", 1 - n / 100) for n in (1, 2)))):
            policy = Policy(str(weights), version, digest_weights(weights), round=version)
            publish(self.project.store, policy)
            if version < 2:
                write(self.project.store, version, RoundEvaluation("not due"))
        damaged = next((folder / "v2").glob("*.safetensors"))
        damaged.write_bytes(damaged.read_bytes()[:-64] + b"\x01" * 64)
        environment = {**os.environ, "RFT_HOME": str(self.home), EXCHANGE_KEY: "k" * 32}
        command = [sys.executable, "-m", "rft_platform.servers.online_service"]
        self._log = (folder / "service.log").open("wb")
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=subprocess.STDOUT)
        self.environment = environment

    def wait_until(self, condition: Callable[[], Any], seconds: float = 60.0) -> float:
        """Wait until a condition is true; returns the seconds."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < seconds, Path(self._log.name).read_text()[-3000:]
            time.sleep(0.05)
        return time.monotonic() - started

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, user: str, **headers: str) -> tuple[str, int]:
        """One chat: the answer's id and the version that its header names."""
        body = {"model": "m", "messages": QUESTION, "max_tokens": 3, "user": user}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["policy_version"] == int(answer.headers["x-policy-version"])
        return answer.json()["id"], int(answer.headers["x-policy-version"])

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, trust_env=False, timeout=60)

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/releases", trust_env=False).json())

    def rft(self, *arguments: str) -> str:
        done = CliRunner().invoke(app, ["models", *arguments], env={"RFT_HOME": str(self.home)})
        assert done.exit_code == 0, done.output
        return done.output

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()
        subprocess.run([sys.executable, "-m", "rft_platform", "stop"], env=self.environment, check=True, timeout=60,
                       stdout=subprocess.DEVNULL)  # fmt: skip


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    made = RunningService(tiny_model, tmp_path_factory.mktemp("service"))
    try:
        made.wait_until(made.answers)
        yield made
    finally:
        made.close()


def test_a_rollback_reaches_the_engine_in_time_and_fails_no_request(service) -> None:
    assert service.ask("ann")[1] == 1, "version 2 is not released"
    stop, served = threading.Event(), []

    def chat() -> None:
        while not stop.is_set():
            served.append(service.ask("bob")[1])

    clients = [threading.Thread(target=chat) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        assert "version 0 serves again" in service.rft("rollback")
        seconds = service.wait_until(lambda: served and served[-1] == 0, 5.0)
        assert service.post("/releases/promote", version=1, reason="better").json()["version"] == 1
        service.wait_until(lambda: served[-1] == 1, 5.0)
    finally:
        stop.set()
        for client in clients:
            client.join(60)
    assert seconds < 5
    assert {0, 1} == set(served)
    versions = json.loads(service.rft("list", "--json"))["versions"]
    assert [each["traffic"] for each in versions] == [0.0, 1.0, 0.0]
    assert "100%" in service.rft("list")


def serve_users(service: RunningService, rewards: dict[int, float], until: Callable[[], bool]) -> dict[str, set[int]]:
    """Users chat and rate each version in their own way until a condition is true; which versions each one got."""
    got: dict[str, set[int]] = {}
    for number in range(400):
        user = f"user-{number % 40}"
        msg_id, version = service.ask(user)
        got.setdefault(user, set()).add(version)
        assert service.post("/feedback", msg_ids=[msg_id], reward=rewards[version]).status_code == 200
        if until():
            return got
    raise AssertionError("the release was not decided")


def test_canaries_are_rolled_back_and_promoted(service) -> None:
    assert service.ask("ann")[1] == 1
    rule = {"share": 0.5, "sticky": "user", "least_runs": 15}
    assert service.post("/releases/canary", version=0, **rule).json()["candidate_version"] == 0
    service.wait_until(lambda: service.ask("x", **{"x-rft-arm": "candidate"})[1] == 0)
    got = serve_users(service, {0: 0.0, 1: 1.0}, lambda: service.status()["release"] is None)
    assert {len(versions) for versions in got.values()} == {1}, "users keep their version"
    assert {version for versions in got.values() for version in versions} == {0, 1}
    assert service.status()["serving"] == 1
    service.post("/releases/promote", version=0)
    service.wait_until(lambda: service.ask("x")[1] == 0)
    service.rft("canary", "1", "--share", "0.5", "--sticky", "user", "--least-runs", "15")
    service.wait_until(lambda: service.ask("x", **{"x-rft-arm": "candidate"})[1] == 1)
    serve_users(service, {0: 0.0, 1: 1.0}, lambda: service.status()["release"] is None)
    service.wait_until(lambda: {service.ask(user)[1] for user in "abcdef"} == {1}, 5.0)
    kinds = [event.kind for event in traffic_store(service.project).events()]
    assert {"canary_rolled_back", "canary_promoted"} <= set(kinds)
    assert "certainly" in service.rft("report")


def test_an_ab_test_is_reported_and_switches(service) -> None:
    service.post("/releases/promote", version=0)
    service.wait_until(lambda: service.ask("x")[1] == 0)
    service.rft("ab", "1", "--units", "30", "--sticky", "request")
    service.wait_until(lambda: service.ask("x", **{"x-rft-arm": "candidate"})[1] == 1)
    serve_users(service, {0: 0.0, 1: 1.0}, lambda: service.status()["release"] is None)
    assert service.status()["serving"] == 1
    assert "the candidate is better" in service.rft("report")
    report = httpx.get(f"{service.url}/releases/report", trust_env=False).json()
    assert report["comparison"]["decision"] == "promote"


def test_the_section_service_reaches_the_process(service) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "I am Mrs Quillfeather"}], "max_tokens": 3}
    answer = service.post("/v1/chat/completions", **body).json()
    refused = service.post("/feedback", msg_ids=[answer["id"]], reward=1, metrics={"charm": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "charm")
    assert service.post("/feedback", msg_ids=[answer["id"]], reward=1, metrics={"helpful": 3}).status_code == 200
    (call,) = traffic_store(service.project).calls([answer["id"]])
    assert (call.state, call.model_call["messages"][0]["content"]) == ("untrainable", "I am [name]")

    def metrics() -> dict[str, float]:
        return dict(httpx.get(f"{service.url}/metrics?format=json", trust_env=False).json())

    service.wait_until(lambda: metrics()["alerts"] == 1)
    found = metrics()
    assert found["calls_redacted"] == 1 and found["recent_label_rate"] < 1
    assert found["requests_refused_by_limit"] == found["rows_above_share"] == found["implicit_failures"] == 0
    page = httpx.get(f"{service.url}/status/live", trust_env=False).text
    assert "Warnings" in page and "the limit is 100.0%" in page
    assert "alert" in [event.kind for event in traffic_store(service.project).events()]


def test_a_damaged_checkpoint_is_rolled_back(service) -> None:
    serving = service.status()["serving"]
    assert service.post("/releases/canary", version=2).status_code == 200
    service.wait_until(lambda: service.status()["release"] is None)
    assert service.status()["serving"] == service.ask("ann")[1] == serving
    assert "cannot be served" in traffic_store(service.project).events()[0].reason


def test_the_pages_show_the_project_and_preferences_become_a_dataset(service, tmp_path) -> None:
    body = {"model": "m", "messages": QUESTION, "max_tokens": 8, "n": 2, "temperature": 2.0}
    assert service.post("/v1/chat/completions", **body).status_code == 200
    status = httpx.get(service.url, trust_env=False, follow_redirects=True, timeout=60).text
    assert "No round has ended yet." not in status
    assert f"Version {service.status()['serving']} serves" in status
    page = httpx.get(f"{service.url}/preferences", trust_env=False).text
    left, right = (re.search(rf'name="{side}" value="(\d+)"', page)[1] for side in ("left", "right"))
    picked = {"left": left, "right": right, "picked": "left"}
    assert httpx.post(f"{service.url}/preferences", data=picked, trust_env=False).status_code == 200
    environment, file = {"RFT_HOME": str(service.home)}, tmp_path / "pairs.jsonl"
    done = CliRunner().invoke(app, ["store", "preferences", str(file)], env=environment)
    assert "1 preference pairs" in done.output
    assert len(load_pairs(str(file), Columns(prompt_type="messages")).rows) == 1
    answer = service.post("/v1/chat/completions", **{**body, "n": 1}).json()
    service.post("/feedback", msg_ids=[answer["id"]], reward=1.0)
    done = CliRunner().invoke(app, ["store", "preferences", str(file), "--ratings"], env=environment)
    assert f"{len(file.read_text().splitlines())} rated answers" in done.output  # other tests have rated answers, too
    rows = load_pairs(str(file), Columns(prompt_type="messages")).rows  # without empty answers
    assert rows[-1]["label"] is True and rows[-1]["prompt"] == QUESTION


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("promote", {"version": 9}), ("rollback", {"version": -1}), ("canary", {"version": 0, "share": 2}),
        ("ab", {"version": 0, "units": 5}), ("canary", {"version": 1, "stick": "user"}),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(service, path, body) -> None:
    answer = service.post(f"/releases/{path}", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
