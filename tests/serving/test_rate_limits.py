"""Limits of tenants: requests a minute and at the same time; a refusal says when to come back."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from rft_platform.inference.interface import PolicyEngine
from rft_platform.serving.rules.rate_limits import LimitExceededError, RateLimits
from tests.serving.test_service import QUESTION, Service

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
    assert limits.refused == 2


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
    service = Service(policy_engine, tmp_path, limits=RateLimits(concurrent_requests=1))
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
