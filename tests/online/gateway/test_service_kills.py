"""kill -9 at any moment: acknowledged feedback stays, no row is in two rounds, and none is lost between them."""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.inference.interface import PolicyEngine
from rft_platform.online.project import project_in
from rft_platform.online.traffic.database import CONSUMED, LABELLED, UNTRAINABLE, open_database
from rft_platform.online.traffic.incoming import ENGINE, TEMPLATE_HASH, NewCall, NewFeedback
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.rounds import explore as collect_stage
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish
from tests.support.ports import free_port

KILLS = 20
ROWS = 6  # of a round


class Killed(BaseException):
    """The process ends here: nothing after this happens."""


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Project:
    config = build_config(
        {
            "model": {"model_path": str(tiny_model), "max_model_len": 64},
            "algorithm": {"algorithm_type": "reinforce++"},
            "buffer": {"train_batch_size": ROWS, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
        }
    )
    project = project_in(Home(tmp_path / "home"), config)
    publish(project.store, Policy("model", 0, "0" * 64, round=0))
    return project


def call(number: int) -> NewCall:
    recorded: dict[str, Any] = {
        "msg_id": f"m{number}", "prompt_ids": [1, 2], "response_ids": [3], "rollout_logprobs": [-0.5],
        "finish_reason": "stop", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "tools": [], "policy_version": 0,
        "messages": [{"role": "user", "content": "?"}], "response": {"role": "assistant", "content": "!"},
    }  # fmt: skip
    recorded |= {ENGINE: "transformers", TEMPLATE_HASH: "t"}
    return NewCall(
        f"m{number}", 0, recorded, policy_version=0, tokens=3, recorded_at=time.time(), task_id=f"t{number // 2}"
    )


def dying(work: Callable[..., Any], before: bool) -> Callable[..., Any]:
    """``work``, with a kill before or after it."""

    def killed(*arguments: Any, **named: Any) -> Any:
        if not before:
            work(*arguments, **named)
        raise Killed

    return killed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_round_that_is_killed_while_it_collects_is_repeated_exactly(project: Project, seed: int, monkeypatch) -> None:
    generator, traffic = random.Random(seed), traffic_store(project)
    numbers = iter(range(1000))
    for round_number in (1, 2):
        for number in [next(numbers) for _ in range(2 * generator.randint(4, 8))]:
            traffic.record([call(number)])
            traffic.give_feedback(NewFeedback(f"f{number}", [f"m{number}"], generator.random()))
        traffic.commit()
        step, before = generator.choice(
            [(TrafficStore, "settle"), (type(project.store), "write_rollouts"), (type(project.store), "write_note"),
             (TrafficStore, "consume")]
        ), generator.random() < 0.5  # fmt: skip
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(*step, dying(getattr(*step), before))
            collect_stage.collect(project, round_number)
        traffic.record([call(next(numbers)), call(next(numbers))])  # the service goes on meanwhile
        summary = collect_stage.collect(project, round_number)
        assert 0 < summary.rows <= ROWS
        publish(project.store, Policy("model", round_number, "0" * 64, round=round_number))
    calls = traffic.calls([f"m{number}" for number in range(next(numbers))])
    rows = Counter(row.call.msg_id for number in (1, 2) for row in project.store.rollout_rows(number))
    assert set(rows.values()) == {1}, "a row is in two rounds"
    assert rows.keys() == {each.msg_id for each in calls if each.state == CONSUMED}
    groups = {row.group_id: number for number in (1, 2) for row in project.store.rollout_rows(number)}
    sizes = Counter(row.group_id for number in (1, 2) for row in project.store.rollout_rows(number))
    assert {sizes[group] for group in groups} == {2}, "a group is split"


@pytest.mark.slow
def test_acknowledged_feedback_survives_kills_of_the_service(policy_engine: PolicyEngine, tmp_path: Path) -> None:
    url, port = f"sqlite:///{tmp_path / 'traffic.db'}", free_port()
    service_module = "chaos.online.echo_service"
    address = [policy_engine.base_url, policy_engine.api_key, json.dumps(asdict(policy_engine.status()))]
    rated: dict[str, float] = {}
    for seed in range(5):
        command = [sys.executable, "-m", service_module, str(port), url, *address]
        service = subprocess.Popen(command, cwd=Path(__file__).parents[3])
        try:
            stop = threading.Event()
            users = [threading.Thread(target=use, args=(port, f"{seed}/{n}", stop, rated)) for n in range(4)]
            for user in users:
                user.start()
            deadline, before = time.monotonic() + 90, len(rated)
            while len(rated) < before + 5 and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(random.Random(seed).uniform(0.0, 0.5))
            assert service.poll() is None
        finally:
            service.kill()
            service.wait()
        stop.set()
        for user in users:
            user.join()
    store = TrafficStore(open_database(url))
    states = (LABELLED, UNTRAINABLE)  # the tiny model may sample NUL, and a text with NUL is not trained on
    kept = {each.msg_id: each.reward for each in store.calls(list(rated)) if each.state in states}
    assert len(rated) >= 25
    assert kept == rated


def use(port: int, name: str, stop: threading.Event, rated: dict[str, float]) -> None:
    """Ask and rate until ``stop`` is set; remember what was acknowledged."""
    generator, root = random.Random(name), f"http://127.0.0.1:{port}"
    with (
        httpx.Client(trust_env=False, timeout=30) as http,
        openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        while not stop.is_set():
            try:
                messages: list[Any] = [{"role": "user", "content": "1+1?"}]
                answer = client.chat.completions.create(model="m", messages=messages, max_tokens=2)
                reward = generator.random()
                done = http.post(f"{root}/feedback", json={"msg_ids": [answer.id], "reward": reward})
                if done.status_code == httpx.codes.OK:
                    rated[answer.id] = reward
            except (openai.APIConnectionError, httpx.TransportError):
                time.sleep(0.1)
