"""User code that blocks the event loop of the runs is reported with its line."""

import asyncio
import logging
import threading
import time

import pytest

from rft_platform.rollout.runs import attempt
from rft_platform.rollout.runs.attempt import run_event_loop


async def block(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)  # noqa: ASYNC251 (what is tested)


def test_code_that_blocks_the_event_loop_is_reported_once_with_its_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt, "LOOK_S", 0.05)
    caplog.set_level(logging.WARNING)
    run_event_loop(block(2.0))
    (found,) = [each.getMessage() for each in caplog.records if "event loop" in each.getMessage()]
    assert found.startswith(f"{__file__}:") and "has blocked the event loop for 0.25 s" in found


def test_code_of_a_task_of_its_own_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt, "LOOK_S", 0.05)

    async def main() -> None:
        await asyncio.gather(asyncio.create_task(block(1.0)))

    run_event_loop(main())
    assert [each for each in caplog.records if each.getMessage().startswith(f"{__file__}:")]


def test_the_caller_of_the_event_loop_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt, "LOOK_S", 0.05)

    async def main() -> None:
        asyncio.get_running_loop().call_soon(time.sleep, 1.0)
        await asyncio.sleep(0.5)

    run_event_loop(main())
    assert not caplog.records


def test_code_that_waits_is_not_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(attempt, "LOOK_S", 0.1)
    caplog.set_level(logging.WARNING)
    run_event_loop(asyncio.sleep(1.5))
    assert not caplog.records


def test_the_watch_ends_with_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "LOOK_S", 0.05)

    async def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_event_loop(interrupted())
    assert not [thread for thread in threading.enumerate() if thread.name == "event-loop-watch"]
