"""Limits of tenants: requests a minute and at the same time; a refusal says when to come back."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import httpx
import openai
import pytest

from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.online.gateway.limits import LimitExceededError, RateLimits
from tests.online.gateway.test_service import QUESTION, Service

KEYS = {"secret-a": "a", "secret-b": "b"}


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def use(limits: RateLimits, caller: str = "a") -> None:
    with limits.admitted(caller):
        pass


def test_a_minute_has_its_requests_and_an_idle_caller_gets_no_more() -> None:
    clock = Clock()
    limits = RateLimits(requests_per_minute=6, clock=clock)
    clock.now = 3600.0
    for _ in range(6):
        use(limits)
    with pytest.raises(LimitExceededError) as error:
        use(limits)
    assert error.value.retry_after_s == 10
    use(limits, "another caller")
    clock.now += 9
    with pytest.raises(LimitExceededError) as error:
        use(limits)
    assert error.value.retry_after_s == 1
    clock.now += 1
    use(limits)
    assert limits.refused == {"a": 2}


def test_a_request_counts_as_open_until_it_ends_also_after_an_error() -> None:
    limits = RateLimits(concurrent_requests=2)
    with ExitStack() as stack:
        stack.enter_context(limits.admitted("a"))
        stack.enter_context(limits.admitted("a"))
        use(limits, "b")
        with pytest.raises(LimitExceededError):
            use(limits)
    with pytest.raises(ZeroDivisionError), limits.admitted("a"):
        raise ZeroDivisionError
    use(limits)


def test_tokens_are_reserved_and_then_replaced_by_those_that_were_used() -> None:
    clock = Clock()
    limits = RateLimits(tokens_per_minute=600, clock=clock)
    large = limits.reserve_tokens("a", 10_000)  # more than a minute's tokens: all of them
    with pytest.raises(LimitExceededError, match="600 tokens a minute") as error:
        limits.reserve_tokens("a", 60)
    assert error.value.retry_after_s == 6
    limits.reserve_tokens("b", 600)
    limits.settle_tokens("a", large, 500)
    limits.settle_tokens("a", limits.reserve_tokens("a", 60), 160)  # more than expected: later requests wait
    with pytest.raises(LimitExceededError) as error:
        limits.reserve_tokens("a", 1)
    assert error.value.retry_after_s == 7
    clock.now += 3600
    limits.settle_tokens("a", limits.reserve_tokens("a", 600), 600)
    assert limits.refused == {"a": 2}


def test_a_tenant_above_its_tokens_gets_429_and_a_refused_request_uses_none(
    policy_engine: PolicyEngine, tmp_path: Path
) -> None:
    limits = RateLimits(tokens_per_minute=100)
    service = Service(policy_engine, tmp_path, keys=KEYS, limits=limits, sampling=SamplingParams(max_tokens=60))
    try:
        client = service.client("secret-a")
        for _ in range(5):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model="m", messages=[{"role": "nobody", "content": "x"}])  # type: ignore[list-item]
        client.chat.completions.create(model="m", messages=QUESTION, max_tokens=2)
        with pytest.raises(openai.RateLimitError, match="100 tokens a minute are the limit") as error:
            client.chat.completions.create(model="m", messages=QUESTION, n=3)
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 60
        service.client("secret-b").chat.completions.create(model="m", messages=QUESTION, max_tokens=2)
        deadline = time.monotonic() + 20
        while service.store.counts()["recorded"] < 2 and time.monotonic() < deadline:
            time.sleep(0.02)  # an answer is stored a moment after it was sent
        metrics = {}
        for tenant in "ab":
            headers = {"authorization": f"Bearer secret-{tenant}"}
            found = httpx.get(f"{service.url}/metrics?format=json", headers=headers, trust_env=False).json()
            metrics[tenant] = (found["requests_answered"], found["requests_refused_by_limit"], found["rows_recorded"])
            assert not {"calls_waiting", "database_failures"} & found.keys()
        assert metrics == {"a": (1, 1, 1), "b": (1, 0, 1)}
    finally:
        service.close()


def test_every_prompt_of_a_completion_counts_once(policy_engine: PolicyEngine, tmp_path: Path) -> None:
    class Noted(RateLimits):
        used: ClassVar[list[int]] = []

        def settle_tokens(self, caller: str, reserved: float, used: int) -> None:
            self.used.append(used)

    service = Service(policy_engine, tmp_path, limits=Noted(tokens_per_minute=10_000))
    try:
        prompts = ["What is 12*7?", "Hello"]
        answers = [
            service.client().completions.create(model="m", prompt=each, n=n, max_tokens=2)
            for each, n in ((prompts[0], 1), (prompts[1], 1), (prompts, 2))
        ]
        first, second, both = [answer.usage for answer in answers]
        assert first is not None and second is not None and both is not None
        deadline = time.monotonic() + 20
        while len(Noted.used) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)  # the tokens are settled a moment after the answer was sent
        assert Noted.used[:2] == [first.total_tokens, second.total_tokens]
        assert Noted.used[2] == first.prompt_tokens + second.prompt_tokens + both.completion_tokens
    finally:
        service.close()


@pytest.fixture
def service(policy_engine: PolicyEngine, tmp_path: Path) -> Iterator[Service]:
    service = Service(policy_engine, tmp_path, keys=KEYS, limits=RateLimits(requests_per_minute=2))
    yield service
    service.close()


@pytest.mark.slow
def test_a_tenant_above_its_rate_gets_429_in_the_form_of_openai(service: Service) -> None:
    client, other = service.client("secret-a"), service.client("secret-b")
    for _ in range(2):
        client.chat.completions.create(model="m", messages=QUESTION, max_tokens=2)
    with pytest.raises(openai.RateLimitError, match="2 requests a minute are the limit") as error:
        client.chat.completions.create(model="m", messages=QUESTION, max_tokens=2)
    assert 1 <= int(error.value.response.headers["retry-after"]) <= 30
    body = error.value.response.json()["error"]
    assert (body["type"], body["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    answer = other.chat.completions.create(model="m", messages=QUESTION, max_tokens=2)
    given = f'{{"msg_ids": ["{answer.id}"], "reward": 1}}'
    codes = [service.post("/feedback", given, authorization="Bearer secret-b").status_code for _ in range(3)]
    assert codes == [200, 200, 429]
    with pytest.raises(openai.AuthenticationError):
        service.client("wrong").chat.completions.create(model="m", messages=QUESTION)
    assert httpx.get(service.url + "/health", trust_env=False).status_code == 200


@pytest.mark.slow
def test_requests_at_the_same_time_are_limited(policy_engine: PolicyEngine, tmp_path: Path) -> None:
    service = Service(
        policy_engine, tmp_path, limits=RateLimits(concurrent_requests=1), sampling=SamplingParams(max_tokens=500)
    )
    try:
        stream = service.client().chat.completions.create(model="m", messages=QUESTION, max_tokens=500, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            service.client().chat.completions.create(model="m", messages=QUESTION, max_tokens=2)
        stream.close()
        deadline = time.monotonic() + 20
        while True:
            try:
                service.client().chat.completions.create(model="m", messages=QUESTION, max_tokens=2)
                break
            except openai.RateLimitError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        service.close()
