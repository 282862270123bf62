"""A signal is never lost in an event loop, whichever handler was installed before."""

import asyncio
import signal
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from rft_platform.cluster.this_process import interruptible_loop, terminable


@pytest.fixture(autouse=True)
def _handlers_of_a_new_process() -> Iterator[None]:
    """Dagster, in whose process other tests have run, installs handlers and leaves them."""
    new = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in new.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Stop(BaseException):
    """What the handler of another library raises."""


def raise_stop(number: int, frame: FrameType | None) -> None:
    raise Stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_a_callback_ends_the_loop(number: signal.Signals) -> None:
    ended: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        try:
            await asyncio.sleep(10)
        finally:
            ended.append("cleaned up")

    before = {each: signal.signal(each, raise_stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt), interruptible_loop():
            asyncio.run(work())
        assert time.monotonic() - started < 5
        assert ended == ["cleaned up"]
        assert {signal.getsignal(each) for each in before} == {raise_stop}
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_termination_ends_a_loop_whose_interruption_is_ignored() -> None:
    async def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(10)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, raise_stop)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible_loop():
            asyncio.run(work())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_a_command_ends_by_each_signal_and_by_a_hang_up_only_once() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminable():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(number)
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_DFL}
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible_loop():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
