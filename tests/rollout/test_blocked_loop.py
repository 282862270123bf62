"""User code that blocks the event loop of the runs: it is reported with its line, and an interruption ends it."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
    monkeypatch.setattr(attempt, "BLOCKED_S", 0.2)
    caplog.set_level(logging.WARNING)
    run_event_loop(block(2.0))
    (found,) = [each.getMessage() for each in caplog.records if "event loop" in each.getMessage()]
    assert found.startswith(f"{__file__}:") and "has blocked the event loop for 0.2 s" in found


def test_code_that_waits_is_not_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(attempt, "BLOCKED_S", 0.5)
    caplog.set_level(logging.WARNING)
    run_event_loop(asyncio.sleep(1.5))
    assert not caplog.records


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_code_that_blocks_the_event_loop(tmp_path: Path, number: int) -> None:
    script = tmp_path / "blocking.py"
    script.write_text(
        "import time\n"
        "from rft_platform.cluster.this_process import terminable\n"
        "from rft_platform.rollout.runs import attempt\n"
        "attempt.BLOCKED_S = 1.0\n"
        "async def block():\n"
        "    print('blocks', flush=True)\n"
        "    time.sleep(100)\n"
        "with terminable():\n"
        "    attempt.run_event_loop(block())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "blocks\n"
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in errors and process.returncode != 0
