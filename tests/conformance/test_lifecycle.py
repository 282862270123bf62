"""Pause and resume; lease, idle time-out, crash."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from rft_platform.cluster.local.leases import read_lease
from rft_platform.common.errors import EngineError, UserError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams

from .conftest import DRIVERS, PROMPTS, launch

START_S = 280  # vLLM compiles on a GPU; on a busy machine it imports for minutes
ATTEMPTS = 10  # a fast engine may end a request before the pause that should meet it


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def start_request(engine: EngineClient, pool: ThreadPoolExecutor) -> Iterator[Callable[[], Future[list[str]]]]:
    """Starts a long request and returns, when its answer has begun, the future of its finish reasons."""
    requests: list[Future[list[str]]] = []

    def ask(begun: threading.Event) -> list[str]:
        with openai.OpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0) as client:
            name = engine.status().model_path
            stream = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "go"}], n=16, seed=3, max_tokens=200, stream=True
            )
            reasons: list[str] = []
            for chunk in stream:
                begun.set()
                reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
            return reasons

    def start() -> Future[list[str]]:
        begun = threading.Event()
        requests.append(pool.submit(ask, begun))
        assert begun.wait(30)
        return requests[-1]

    yield start
    engine.resume()
    for request in requests:
        request.result(60)


@pytest.fixture
def running(start_request: Callable[[], Future[list[str]]]) -> Future[list[str]]:
    return start_request()


def test_a_paused_engine_holds_new_requests(engine: EngineClient, pool: ThreadPoolExecutor) -> None:
    expected = engine.generate(PROMPTS[:1], SamplingParams(4, seed=1))
    engine.pause("wait")
    assert engine.status().paused
    held = pool.submit(engine.generate, PROMPTS[:1], SamplingParams(4, seed=1))
    assert engine.score(PROMPTS[:1])  # the control plane still answers
    assert not held.done()
    engine.resume()
    assert held.result(30) == expected
    assert not engine.status().paused


def test_pause_wait_lets_running_requests_finish(engine: EngineClient, running: Future[list[str]]) -> None:
    engine.pause("wait")
    reasons = running.result(60)
    assert len(reasons) == 16 and set(reasons) <= {"stop", "length"}


def test_pause_abort_ends_running_requests(
    engine: EngineClient, start_request: Callable[[], Future[list[str]]]
) -> None:
    for _ in range(ATTEMPTS):
        request = start_request()
        engine.pause("abort")
        reasons = request.result(60)
        assert len(reasons) == 16
        if "abort" in reasons:
            return
        engine.resume()
    pytest.fail(f"no answer ended with 'abort' in {ATTEMPTS} requests")


def test_pause_with_keep_freezes_requests_and_resume_continues_them(
    engine: EngineClient, start_request: Callable[[], Future[list[str]]]
) -> None:
    for _ in range(ATTEMPTS):
        request = start_request()
        engine.pause("keep")
        tokens = engine.metrics()["completion_tokens"]
        if "score-frozen" in engine.status().capabilities:
            engine.score(PROMPTS)
        else:
            with pytest.raises(EngineError, match="frozen"):
                engine.score(PROMPTS)
        with suppress(TimeoutError):
            request.result(0.3)
        assert engine.metrics()["completion_tokens"] == tokens
        frozen = not request.done()
        engine.resume()
        reasons = request.result(60)
        assert len(reasons) == 16 and set(reasons) <= {"stop", "length"}
        if frozen:
            return
    pytest.fail(f"none of {ATTEMPTS} requests was frozen: each ended before its pause or in spite of it")


def test_an_update_ends_a_freeze_of_what_runs_but_not_the_pause(
    engine: EngineClient, running: Future[list[str]]
) -> None:
    engine.pause("keep")
    status = engine.status()
    engine.update_weights(Path(status.model_path), 0)
    assert set(running.result(60)) <= {"stop", "length"}
    assert engine.status().paused


def test_an_unknown_pause_mode_is_refused(engine: EngineClient) -> None:
    with pytest.raises(UserError, match="keep, abort, wait"):
        engine.pause("nap")  # type: ignore[arg-type]


def test_the_control_plane_needs_the_token(engine: EngineClient) -> None:
    url = engine.base_url.removesuffix("/v1")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic " + "x" * 43}):
        answer = httpx.post(f"{url}/engine/shutdown", headers=headers, trust_env=False)
        assert answer.status_code == 401 and "lease" in answer.json()["error"]["message"]
    with EngineClient(url) as stranger, pytest.raises(EngineError, match="401"):
        stranger.status()


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("kind", DRIVERS)
@pytest.mark.slow
def test_a_lease_is_found_again_a_killed_engine_replaced_and_an_idle_one_ends(
    request: pytest.FixtureRequest, kind: str, tiny_model: Path, tmp_path: Path
) -> None:
    def connect(**settings: Any) -> EngineClient:
        return launch(request, kind, tiny_model, tmp_path, **settings)

    with ThreadPoolExecutor(2) as pool:  # two callers at once get one engine
        clients = [pool.submit(connect, idle_timeout_s=600) for _ in range(2)]
        first, second = (client.result(START_S) for client in clients)
    assert first.status().pid == second.status().pid
    lease_file = tmp_path / "leases" / "engine.json"
    assert lease_file.stat().st_mode & 0o777 == 0o600
    killed = psutil.Process(first.status().pid)
    killed.kill()
    killed.wait(10)
    with pytest.raises(EngineError, match="does not answer"):
        first.status()
    idle_timeout_s = 1.0
    third = connect(idle_timeout_s=idle_timeout_s)  # the dead one's lease names another process
    process = psutil.Process(third.status().pid)
    assert process.pid != killed.pid
    httpx.get(third.base_url.removesuffix("/v1") + "/health", trust_env=False)
    process.wait(30)
    assert read_lease(lease_file) is None
    for client in (first, second, third):
        client.close()
