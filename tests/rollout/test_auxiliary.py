"""Auxiliary models: asked by name, within their limits, never recorded, with a secret that stays secret."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel, AuxiliarySpec
from rft_platform.rollout.workflows.chat_models import framework_models

from .fake_engine import FakeEngine
from .samples import tasks


class Endpoint:
    """An OpenAI endpoint that keeps what it is asked, answers slowly, and counts how much it is asked at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._now = 0
        self.refuse_next = 0
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status, answer = endpoint.answer(json.loads(body), self.headers.get("authorization"))
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("retry-after-ms", "1")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def answer(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            refused, self.refuse_next = self.refuse_next > 0, max(0, self.refuse_next - 1)
        time.sleep(0.02)
        with self._lock:
            self._now -= 1
            self.bodies.append(body)
            self.keys.append(key)
        if refused:
            return 503, {"error": {"message": "busy"}}
        message = {"role": "assistant", "content": f"heard {body['messages'][-1]['content']}"}
        return 200, {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint()
    yield served
    served.close()


def spec(endpoint: Endpoint, **changes: Any) -> AuxiliarySpec:
    return AuxiliarySpec(**{"name": "critic", "model": "big", "base_url": endpoint.url, **changes})


def said(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_model_is_called_from_several_event_loops_and_threads(endpoint: Endpoint) -> None:
    model = AuxiliaryModel(spec(endpoint))
    for turn in ("one", "two"):
        answer = asyncio.run(model.chat(said(turn)))
        assert answer == {"role": "assistant", "content": f"heard {turn}"}
    client: Any = model.get_openai_client()
    done = client.chat.completions.create(model=model.model_name, messages=said("three"))
    assert done.choices[0].message.content == "heard three"
    model.close()
    assert [body["model"] for body in endpoint.bodies] == ["big"] * 3
    assert not any("return_token_ids" in body or "logprobs" in body for body in endpoint.bodies)  # nothing is recorded


def test_defaults_fill_what_the_caller_leaves_open(endpoint: Endpoint) -> None:
    model = AuxiliaryModel(spec(endpoint, defaults={"temperature": 0.2, "max_tokens": 64}))
    asyncio.run(model.chat(said("a")))
    asyncio.run(model.chat(said("b"), temperature=1.5, max_completion_tokens=7))
    first, second = endpoint.bodies
    assert (first["temperature"], first["max_tokens"]) == (0.2, 64)
    assert second["temperature"] == 1.5
    assert "max_tokens" not in second


@pytest.mark.parametrize("blocking", [False, True])
def test_no_more_requests_at_once_than_allowed(endpoint: Endpoint, blocking: bool) -> None:
    model = AuxiliaryModel(spec(endpoint, max_concurrency=3))

    def ask() -> None:
        client: Any = model.get_openai_client()
        client.chat.completions.create(model="big", messages=said("x"))

    async def ask_all() -> None:
        calls = [asyncio.to_thread(ask) if blocking else model.chat(said("x")) for _ in range(12)]
        await asyncio.gather(*calls)

    asyncio.run(ask_all())
    model.close()
    assert len(endpoint.bodies) == 12
    assert endpoint.most_at_once == 3


def test_a_refused_request_is_repeated_and_gives_its_slot_back(endpoint: Endpoint) -> None:
    endpoint.refuse_next = 2
    model = AuxiliaryModel(spec(endpoint, max_concurrency=1))
    assert asyncio.run(model.chat(said("again")))["content"] == "heard again"
    assert len(endpoint.bodies) == 3


@pytest.mark.slow
def test_requests_rotate_over_replicas_and_skip_a_lost_one(endpoint: Endpoint) -> None:
    second, gone = Endpoint(), Endpoint()
    gone.close()
    model = AuxiliaryModel(spec(endpoint, other_urls=(gone.url, second.url)))

    async def ask_all() -> None:
        for turn in range(6):
            await model.chat(said(str(turn)))

    asyncio.run(ask_all())
    second.close()
    assert len(endpoint.bodies) + len(second.bodies) == 6
    assert endpoint.bodies
    assert second.bodies


def test_the_key_comes_from_the_environment_and_is_never_shown(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed = spec(endpoint, api_key_env="CRITIC_KEY")
    monkeypatch.delenv("CRITIC_KEY", raising=False)
    with pytest.raises(UserError, match=r"'critic'.*CRITIC_KEY is not set.*export the key"):
        AuxiliaryModel(keyed)
    monkeypatch.setenv("CRITIC_KEY", "s3cret")
    model = AuxiliaryModel(AuxiliarySpec.from_json(json.loads(json.dumps(asdict(keyed)))))
    assert model.spec == keyed
    asyncio.run(model.chat(said("hello")))
    assert endpoint.keys == ["Bearer s3cret"]
    assert "s3cret" not in f"{model!r} {model.spec!r} {asdict(keyed)}"


def test_a_workflow_gets_them_by_name_and_its_rows_hold_the_policy_alone(
    engine: FakeEngine, endpoint: Endpoint
) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle, auxiliary_models: dict[str, Any]) -> WorkflowOutput:
        client: Any = model.get_openai_async_client()
        answer = await client.chat.completions.create(model=model.model_name, messages=said(task["question"]))
        critic: Any = auxiliary_models["critic"].get_openai_async_client()
        heard = await critic.chat.completions.create(model="big", messages=said("was that right?"))
        assert heard.choices[0].message.content == "heard was that right?"
        return WorkflowOutput(reward=1.0, response=answer.choices[0].message.content)

    done = run_rollouts(
        engine,
        tasks(3),
        workflow,
        round=1,
        batch=0,
        repeat_times=2,
        sampling=SamplingParams(max_tokens=16),
        auxiliary_models={"critic": AuxiliaryModel(spec(endpoint))},
    )
    assert len(done.rows) == 6  # one a run: that of the policy
    assert all(row.messages[-1]["content"].startswith("q") for row in done.rows)
    assert len(endpoint.bodies) == 6


def test_user_functions_get_an_empty_dict_without_any_and_other_objects_as_they_are() -> None:
    assert framework_models(None) == {}
    assert framework_models({"x": "anything"}) == {"x": "anything"}
