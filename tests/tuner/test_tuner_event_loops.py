"""Blocking work below a running event loop, as in a notebook."""

import _thread
import asyncio
import threading
import time

import pytest

from rft_platform.cluster.this_process import terminable, undisturbed
from rft_platform.tuner.tuning import outside_event_loop


def loop_of_its_own() -> str:
    async def answer() -> str:
        return threading.current_thread().name

    with terminable(), undisturbed():
        return asyncio.run(answer())


def test_without_an_event_loop_the_caller_does_the_work() -> None:
    assert outside_event_loop(loop_of_its_own) == threading.current_thread().name


async def test_below_an_event_loop_the_loop_continues_afterwards() -> None:
    loop = asyncio.get_running_loop()
    assert outside_event_loop(loop_of_its_own) == threading.current_thread().name
    assert asyncio.get_running_loop() is loop
    assert await asyncio.wait_for(asyncio.sleep(0, "answer"), timeout=5) == "answer"

    def fail() -> None:
        raise ValueError("what went wrong")

    with pytest.raises(ValueError, match="what went wrong"):
        outside_event_loop(fail)


async def test_ctrl_c_reaches_the_work_and_its_end_is_waited_for() -> None:
    tidied = []

    def work() -> None:
        try:
            _thread.interrupt_main()
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            tidied.append(True)

    with pytest.raises(KeyboardInterrupt):
        outside_event_loop(work)
    assert tidied == [True]
