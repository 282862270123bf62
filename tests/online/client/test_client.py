"""The clients against the real service: chat, feedback, late feedback, commits at exit."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rft_platform.common.errors import UserError
from rft_platform.inference.interface import PolicyEngine
from rft_platform.online import AsyncOnlineClient, Metric, OnlineClient, UnknownAnswersError
from rft_platform.online.client import openai_clients as online_client
from rft_platform.online.gateway.limits import RateLimits
from tests.online.gateway.test_service import Service

QUESTION = [{"role": "user", "content": "What is 12*7?"}]


def ask(client: OnlineClient) -> str:
    return client.chat.completions.create(model="policy", messages=QUESTION, max_tokens=4).id


def test_the_end_of_the_block_commits(service) -> None:
    with OnlineClient(service.url, metrics=[Metric("helpful", max=5)]) as client:
        msg_id = ask(client)
        given: dict[str, Any] = {"reward": 1.0, "metrics": {"helpful": 5}, "comment": "good", "feedback_id": "f1"}
        done = client.feedback(msg_id, **given)
        assert (done.matched, done.duplicate, done.late, done.unknown) == (1, 0, 0, ())
        assert client.feedback(msg_id, **given).duplicate == 1, "a repeated feedback changes nothing"
        with pytest.raises(openai.ConflictError, match="another feedback has this id"):
            client.feedback(msg_id, reward=0.0, feedback_id="f1")
    (row,) = service.store.settle(1)
    assert row.reward == 1.0
    with OnlineClient(service.url) as client:
        assert client.feedback(msg_id, reward=0.0).late == 1
        with pytest.raises(UnknownAnswersError, match="chatcmpl-none"):
            client.feedback("chatcmpl-none", reward=1.0)


def test_a_run_has_its_calls_and_one_reward(service) -> None:
    with OnlineClient(f"{service.url}/v1") as client:
        run = client.run("t1", "0", subject="ann")
        ask(run)
        list(run.chat.completions.create(model="policy", messages=QUESTION, max_tokens=4, stream=True))
        assert run.feedback(reward=0.5).matched == 2
        assert client.commit(task_id="other").committed == 0
        assert client.commit(task_id="t1", run_id="0").committed == 2
    assert {(row.task_id, row.run_id, row.subject, row.reward) for row in service.store.settle(1)} == {
        ("t1", "0", "ann", 0.5)
    }


def test_completions_and_responses_are_rated(service) -> None:
    with OnlineClient(service.url) as client:
        text = client.completions.create(model="policy", prompt="12*7 =", max_tokens=4)
        response = client.responses.create(model="policy", input="What is 12*7?")
        *_, last = client.responses.create(model="policy", input="What is 12*7?", stream=True)
        assert client.feedback([text, response, last], reward=1.0).matched == 3


def test_a_block_that_fails_commits_what_was_rated(service) -> None:
    with pytest.raises(ZeroDivisionError), OnlineClient(service.url) as client:
        client.feedback(ask(client), reward=1.0)
        _ = 1 / 0
    assert len(service.store.settle(1)) == 1


async def test_the_asynchronous_client(service) -> None:
    async with AsyncOnlineClient(service.url) as client:
        run = client.run(conversation_id="c")
        answer = await run.chat.completions.create(model="policy", messages=QUESTION, max_tokens=4)
        assert (await run.feedback(reward=1.0)).matched == 1
        assert (await client.feedback(answer, reward=0.25)).matched == 1, "a later reward replaces the first"
        text = await client.completions.create(model="policy", prompt="12*7 =", max_tokens=4)
        response = await client.responses.create(model="policy", input="What is 12*7?")
        assert (await client.feedback([text, response], correction="84")).matched == 2
        with pytest.raises(UnknownAnswersError):
            await client.feedback(["nothing"], reward=1.0)
    (row,) = service.store.settle(1)
    assert (row.reward, row.conversation) == (0.25, "c")


def test_wrong_addresses_and_names_are_refused(service) -> None:
    with pytest.raises(UserError, match="base_url"):
        OnlineClient("127.0.0.1:8010")
    client = OnlineClient(service.url)
    with pytest.raises(UserError, match="ASCII"):
        client.run("Aufgabe ä")
    client.close()
    with pytest.raises(openai.APIConnectionError), OnlineClient("http://127.0.0.1:9", max_retries=0):
        pass


@pytest.fixture
def limited(policy_engine: PolicyEngine, tmp_path: Path) -> Iterator[Service]:
    """A service that admits a request a second after a tenant's first 60."""
    service = Service(policy_engine, tmp_path, limits=RateLimits(requests_per_minute=60))
    yield service
    service.close()


def test_feedback_above_the_rate_limit_waits_and_is_sent_again(limited) -> None:
    with OnlineClient(limited.url) as client:
        msg_id = ask(client)
        while limited.post("/commit", "").status_code == 200:
            pass
        limited.limits._requests._buckets["other/"].level -= 4  # a request succeeds in 5 s
        began = time.monotonic()
        assert client.feedback(msg_id, reward=1.0, feedback_id="f").matched == 1
        assert 3 < time.monotonic() - began < 30
    assert len(limited.store.settle(1)) == 1


async def test_the_wait_for_the_rate_limit_has_an_end(limited) -> None:
    client = AsyncOnlineClient(limited.url, rate_limit_wait_s=0.5, max_retries=0)
    while limited.post("/commit", "").status_code == 200:
        pass
    limited.limits._requests._buckets["other/"].level -= 4
    with pytest.raises(openai.RateLimitError):
        await client.commit()
    await client.close()


class Scripted(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A service that answers with the given statuses in turn; 0 is a lost connection."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        status = self.statuses.pop(0)
        if not status:
            raise httpx.ConnectError("lost", request=request)
        return httpx.Response(
            status, headers={"retry-after": "30"}, json={"committed": 3, "pending_groups": 0}, request=request
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


async def test_without_a_wait_a_request_above_the_rate_limit_is_sent_once() -> None:
    service = Scripted(429, 429, 200)
    began = time.monotonic()
    with httpx.Client(transport=service) as http, pytest.raises(openai.RateLimitError):
        OnlineClient(rate_limit_wait_s=0, http_client=http).commit()
    async with httpx.AsyncClient(transport=service) as http:
        with pytest.raises(openai.RateLimitError):
            await AsyncOnlineClient(rate_limit_wait_s=0, http_client=http).commit()
    assert service.statuses == [200]
    assert time.monotonic() - began < 5


def test_retries_outlast_a_restart_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(online_client.time, "sleep", waits.append)
    with httpx.Client(transport=Scripted(*[0] * 6, 200)) as http:
        client = OnlineClient(http_client=http)
        assert client.commit().committed == 3 and client.openai.max_retries == 6
    assert sum(waits) > 15


def test_failures_of_connection_and_service_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_client, "_FIRST_PAUSE_S", 0.01)
    service = Scripted(0, 503, 200, 0, 0, 503, 400)
    with httpx.Client(transport=service) as http:
        client = OnlineClient(http_client=http, max_retries=2)
        assert client.commit().committed == 3
        with pytest.raises(openai.InternalServerError):
            client.commit()
        with pytest.raises(openai.BadRequestError):
            client.commit()
    assert service.statuses == []
