"""The gateway: agents in other processes, isolated by their keys, recorded like those of this one."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.inference.interface import SamplingParams
from rft_platform.openai_api.schema import ChatBody
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.gateway import RecordingGateway
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import WorkflowOutput

from .fake_engine import FakeEngine, answer_to, render
from .samples import tasks

PROGRAM = Path(__file__).with_name("agent_program.py")
MESSAGES: Any = [{"role": "user", "content": "2+2?"}]


def new_history(key: str = "r0001-b0000/t00000/000") -> RunHistory:
    return RunHistory("fake-model", SamplingParams(64, temperature=0.7), 1, key)


@pytest.fixture
def clients(engine: FakeEngine) -> Iterator[RecordingClients]:
    """The roads to the fake engine."""
    made = RecordingClients(engine.base_url, timeout_s=30, api_key=engine.api_key)
    yield made
    made.close()


@pytest.fixture
def gateway(clients: RecordingClients) -> RecordingGateway:
    """Its gateway."""
    return clients.gateway


def post(gateway: RecordingGateway, key: str, path: str = "/chat/completions", **headers: str) -> httpx.Response:
    """A call without any client of OpenAI's."""
    bearer = {"authorization": f"Bearer {key}", **headers}
    body = {"model": "m", "messages": MESSAGES}
    return httpx.post(gateway.base_url + path, json=body, headers=bearer, trust_env=False, timeout=30)


def environment(url: str, key: str = "") -> dict[str, str]:
    return {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "no_proxy": "*"}


async def program_workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """An agent that is its own program."""
    number = task["question"].removeprefix("question ")
    agent = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), "openai", f"{number}+1",
        env=environment(model.base_url, model.api_key), stdout=subprocess.PIPE,
    )  # fmt: skip
    output, _ = await agent.communicate()
    return WorkflowOutput(response=output.decode().strip())


@pytest.mark.slow
def test_a_program_with_an_openai_client_is_a_workflow(engine: FakeEngine) -> None:
    batch = run_rollouts(
        engine,
        tasks(3),
        program_workflow,
        round=1,
        batch=0,
        repeat_times=1,
        sampling=SamplingParams(64),
        limits=RolloutLimits(timeout_s=120),
    )
    assert batch.report.failed == 0 and [row.step for row in batch.rows] == [0, 1] * 3
    for number in range(3):
        first, second = batch.rows[2 * number : 2 * number + 2]
        assert first.response["tool_calls"][0]["function"]["arguments"] == f'{{"expression": "{number}+1"}}'
        assert second.messages[1]["tool_calls"] == first.response["tool_calls"]
        assert second.messages[-1]["content"] == str(number + 1)
        assert second.response["content"] == second.run_output


@pytest.mark.slow
def test_hundreds_of_agents_outside_do_not_mix(engine: FakeEngine, clients: RecordingClients, tmp_path: Path) -> None:
    histories = [new_history(f"r0001-b0000/t{number:05d}/000") for number in range(200)]
    keys = [clients.gateway.register(history) for history in histories]
    assert [key.rpartition(".")[0] for key in keys] == [history.key for history in histories]
    (tmp_path / "agents").write_text("\n".join(f"{key}, agent {number}" for number, key in enumerate(keys)))
    command = [sys.executable, str(PROGRAM), "urllib", str(tmp_path / "agents")]
    subprocess.run(command, env=environment(clients.gateway.base_url), check=True, timeout=120)
    for number, history in enumerate(histories):
        first, second = history.calls()
        assert first.messages == [{"role": "user", "content": f"agent {number}"}]
        assert second.messages[1] == first.response and second.messages[2]["content"] == f"again, agent {number}"
        assert first.response["content"] == answer_to(render(first.messages), history.call_seed(0), 0)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_is_an_agent(gateway: RecordingGateway) -> None:
    history = new_history()
    key = gateway.register(history)
    body = json.dumps({"model": "m", "messages": MESSAGES, "stream": True})
    answer = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", f"{gateway.base_url}/chat/completions", "-d", body,
         "-H", f"Authorization: Bearer {key}", "-H", "Content-Type: application/json"],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    events = [json.loads(line[6:]) for line in answer.stdout.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    (call,) = history.calls()
    assert text == call.response["content"] and answer.stdout.rstrip().endswith("data: [DONE]")
    assert "token_ids" not in answer.stdout


def test_keys_that_name_no_run_are_refused(clients: RecordingClients, engine: FakeEngine) -> None:
    gateway, history = clients.gateway, new_history()
    key = gateway.register(history)
    assert gateway.register(history) == key
    attempt = new_history()
    other = gateway.register(attempt)  # a second attempt at the same run
    name = history.key
    assert other != key and other.startswith(name) and key.startswith(name)
    forged = key[:-1] + ("A" if key[-1] != "A" else "B")
    clients.end(history)
    unknown = ("EMPTY", "r0001-b0000/t00009/000", name, forged, f"{name}.", other.rpartition(".")[0])
    refused = {given: post(gateway, given) for given in (key, *unknown)}
    assert {answer.status_code for answer in refused.values()} == {401}
    codes = {given: answer.json()["error"]["code"] for given, answer in refused.items()}
    assert codes == {key: "run_ended", **dict.fromkeys(unknown, "unknown_run")}
    secret = key.rpartition(".")[2]
    assert len(secret) >= 32 and not any(secret in answer.text for answer in refused.values())
    assert post(gateway, other).status_code == 200 and len(attempt.calls()) == 1
    assert engine.authorizations == {"Bearer fake-key"}  # the engine never sees the run's
    assert history.calls() == [] and len(engine.chat_requests) == 1


def test_keys_are_not_guessable_and_appear_in_no_row(gateway: RecordingGateway) -> None:
    histories = [new_history() for _ in range(3)]
    keys = [gateway.register(history) for history in histories]
    assert len({key.rpartition(".")[2] for key in keys}) == 3
    post(gateway, keys[0])
    (call,) = histories[0].calls()
    assert keys[0].rpartition(".")[2] not in repr(call)


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
def test_web_pages_are_refused(gateway: RecordingGateway, headers: dict[str, str]) -> None:
    answer = post(gateway, gateway.register(new_history()), **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


def test_a_run_that_has_closed_is_refused_as_in_process(gateway: RecordingGateway, engine: FakeEngine) -> None:
    history = new_history()
    key = gateway.register(history)
    history.close()
    assert (post(gateway, key).status_code, engine.chat_requests) == (401, [])


def test_other_routes_are_refused_and_models_are_listed(gateway: RecordingGateway, engine: FakeEngine) -> None:
    key = gateway.register(new_history())
    assert post(gateway, key, "/embeddings").json()["error"]["code"] == "not_found"
    bearer = {"authorization": f"Bearer {key}"}
    engine.extra_routes = {"/v1/models": {"object": "list", "data": [{"id": "fake-model"}]}}
    listed = httpx.get(f"{gateway.base_url}/models", headers=bearer, trust_env=False)
    assert listed.json()["data"][0]["id"] == "fake-model"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/chat/completions", {"max_tokens": "abc"}),
        ("/chat/completions", {"n": "two"}),
        ("/responses", {"input": "2+2?", "tools": ["a"]}),
        ("/responses", {"input": "2+2?", "text": "y"}),
        ("/responses", {"input": [{"type": "reasoning", "content": ["s"]}]}),
    ],
)
def test_fields_of_the_wrong_type_are_refused_and_leave_nothing_under_way(
    gateway: RecordingGateway, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    history = new_history()
    body = {"model": "m", "messages": MESSAGES, **fields}
    key = {"authorization": f"Bearer {gateway.register(history)}"}
    answer = httpx.post(gateway.base_url + path, json=body, headers=key, trust_env=False, timeout=30)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert history.unfinished_calls == 0 and engine.chat_requests == []


class _Chunked(BaseHTTPRequestHandler):
    """Refuses every request, with an answer of unknown length."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        content = b'{"error": {"message": "no such adapter"}}'
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))

    def log_message(self, *_arguments: Any) -> None:
        """Write nothing."""


def test_an_error_that_the_engine_sends_in_chunks_arrives() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Chunked) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        clients = RecordingClients(f"http://127.0.0.1:{server.server_port}/v1", timeout_s=5)
        answer = post(clients.gateway, clients.gateway.register(new_history()))
        clients.close()
        server.shutdown()
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "no such adapter"}})


def test_an_engine_that_is_gone_is_a_502_and_noted(gateway: RecordingGateway, engine: FakeEngine) -> None:
    history = new_history()
    key = gateway.register(history)
    engine.shutdown()
    answer = post(gateway, key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_unavailable")
    assert history.connection_lost and history.calls() == []


def lose_the_answer(gateway: RecordingGateway, key: str, content: bytes, history: RunHistory) -> None:
    """Send a call, wait until it is recorded, and go away without reading the answer."""
    with socket.create_connection(("127.0.0.1", httpx.URL(gateway.base_url).port or 0)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        head += f"idempotency-key: k1\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        until(lambda: len(history.calls()) == 1)


def until(reached: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("headers", [{"idempotency-key": "k1"}, {"x-stainless-retry-count": "1"}])
def test_a_call_whose_answer_was_lost_is_recorded_once(
    gateway: RecordingGateway, engine: FakeEngine, headers: dict[str, str]
) -> None:
    history = new_history()
    key = gateway.register(history)
    if "idempotency-key" in headers:
        lose_the_answer(gateway, key, json.dumps({"model": "m", "messages": MESSAGES}).encode(), history)
    else:
        post(gateway, key)
    answer = post(gateway, key, **headers).json()
    (call,) = history.calls()
    assert call.msg_id == answer["id"] and call.order == 0 and history.client_retries == 1
    assert len({body["seed"] for body in engine.chat_requests}) == 1 and len(engine.chat_requests) == 2
    assert history.unfinished_calls == 0
    post(gateway, key)  # the same question, asked on purpose, is its own call
    assert [call.order for call in history.calls()] == [0, 1]


def test_a_call_of_an_agent_that_disconnects_is_not_recorded(gateway: RecordingGateway, engine: FakeEngine) -> None:
    history = new_history()
    key = gateway.register(history)
    engine.hold = threading.Event()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.base_url}/chat/completions", json={"messages": MESSAGES}, timeout=0.5, trust_env=False,
            headers={"authorization": f"Bearer {key}"},
        )  # fmt: skip
    until(lambda: engine.left == 1)
    engine.hold.set()
    assert history.calls() == []


def test_a_run_that_ends_breaks_off_what_is_under_way(clients: RecordingClients, engine: FakeEngine) -> None:
    gateway, history = clients.gateway, new_history()
    key = gateway.register(history)
    engine.hold = threading.Event()
    threading.Timer(0.5, clients.end, [history]).start()
    with openai.OpenAI(base_url=gateway.base_url, api_key=key) as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="m", messages=MESSAGES)
    engine.hold.set()
    assert history.calls() == []


class Sum(BaseModel):
    """What an agent wants as an answer."""

    digits: list[int]


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["chat", "responses"])
def test_structured_output_of_the_openai_client(engine: FakeEngine, gateway: RecordingGateway, endpoint: str) -> None:
    """``parse`` needs no change: its schema reaches the engine, the answer is parsed and recorded as constrained."""
    engine.text, engine.constrained, history = '{"digits": [8, 4]}', True, new_history()
    with openai.OpenAI(base_url=gateway.base_url, api_key=gateway.register(history), max_retries=0) as client:
        if endpoint == "chat":
            chat = client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Sum)
            parsed = chat.choices[0].message.parsed
        else:
            parsed = client.responses.parse(model="m", input="2+2?", text_format=Sum).output_parsed
    assert parsed == Sum(digits=[8, 4])
    (body,) = engine.chat_requests
    checked = ChatBody.model_validate(body)
    assert checked.asks_for_json and body["response_format"]["json_schema"]["schema"]["required"] == ["digits"]
    (call,) = history.calls()
    assert call.constrained and call.response["content"] == engine.text
