"""Agents of many frameworks, and curl, in production: the gateway serves, records, rates and commits their calls."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.online.traffic.database import COMMITTED
from tests.online.gateway.test_service import Service

from .conftest import EXAMPLES, STACKS, required
from .teacher import ANSWER, QUESTION

SCRIPT = Path(__file__).with_name("production_agent.py")
pytestmark = pytest.mark.slow


@pytest.fixture
def gateway(agents_engine: PolicyEngine, tmp_path: Path) -> Iterator[Service]:
    """The service before the engine whose model knows the agents' tools."""
    service = Service(agents_engine, tmp_path, sampling=SamplingParams(max_tokens=64, temperature=0.2))
    yield service
    service.close()


def answer_of(python: Path, stack: str, url: str, key: str) -> str:
    """What the framework's agent prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "NO_PROXY": "127.0.0.1"}
    command = [str(python), str(SCRIPT), stack, str(EXAMPLES / STACKS[stack][0]), QUESTION]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack != "agentscope_structured"])
def test_an_agent_of_a_framework_is_served_recorded_rated_and_committed(
    stack: str, request: pytest.FixtureRequest
) -> None:
    python = required(stack)
    gateway: Service = request.getfixturevalue("gateway")
    assert ANSWER in answer_of(python, stack, gateway.url, "b1/calculation/run-7")
    named = {"task_id": "b1/calculation", "run_id": "run-7"}
    rated = httpx.post(f"{gateway.url}/feedback", json={**named, "reward": 1.0}, trust_env=False).json()
    assert rated["matched"] >= 2, f"{rated}: a call with a tool call, and the answer"
    committed = httpx.post(f"{gateway.url}/commit", json=named, trust_env=False).json()
    assert committed["committed"] == rated["matched"]
    calls = [gateway.store.calls([msg_id])[0] for msg_id in msg_ids(gateway)]
    assert {(call.task_id, call.run_id, call.state, call.reward) for call in calls} == {
        ("b1/calculation", "run-7", COMMITTED, 1.0)
    }
    said = [call.model_call["response"] for call in calls]
    assert any(message.get("tool_calls") for message in said), "the tool call is recorded"
    for call in calls:
        tokens = call.model_call["response_ids"]
        assert len(tokens) == len(call.model_call["rollout_logprobs"]) > 0


def msg_ids(service: Service) -> list[str]:
    """Ids of all answers that are stored."""
    from sqlalchemy import text

    with service.store._engine.connect() as connection:
        return [row[0] for row in connection.execute(text("SELECT msg_id FROM calls ORDER BY msg_id"))]


def curl(url: str, *arguments: str) -> str:
    """What curl prints."""
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--noproxy", "*", url, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine (Debian: curl)")
def test_curl_chats_streams_rates_and_commits(policy_engine: PolicyEngine, tmp_path: Path) -> None:
    service = Service(policy_engine, tmp_path, keys={"shop-key-of-16-characters": "shop"})
    body: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
    key = ("--header", "authorization: Bearer shop-key-of-16-characters")
    as_json = (*key, "--header", "content-type: application/json", "--data")
    try:
        chat = f"{service.url}/v1/chat/completions"
        answer = json.loads(curl(chat, *as_json, json.dumps(body)))
        events = curl(chat, "--no-buffer", *as_json, json.dumps({**body, "stream": True})).split("\n\n")
        streamed = json.loads(events[0].removeprefix("data: "))
        ids = [answer["id"], streamed["id"]]
        rated = json.loads(curl(f"{service.url}/feedback", *as_json, json.dumps({"msg_ids": ids, "reward": 0.5})))
        committed = json.loads(curl(f"{service.url}/commit", *key, "--request", "POST"))
        with pytest.raises(subprocess.CalledProcessError) as refused:
            curl(chat, "--header", "content-type: application/json", "--data", json.dumps(body))
    finally:
        service.close()
    assert events[-2].strip() == "data: [DONE]" or events[-1].strip() == "data: [DONE]"
    assert (rated["matched"], committed["committed"]) == (2, 2)
    assert {call.state for call in service.store.calls(ids)} == {COMMITTED}
    assert "401" in refused.value.stderr
