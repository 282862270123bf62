"""Calls in a worker process: results, errors, limits of processor time and memory, reuse, and what is left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from rft_platform.common.errors import UserCodeError
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.judging.rules.mathematics import are_equal
from rft_platform.judging.sandbox import bounded_call
from rft_platform.judging.sandbox.bounded_call import LimitExceededError, call_bounded
from rft_platform.tasks.task import Task

from .conftest import run_rows

BOMB = r"So it is $9^{9^9}$."


def call(function: Any, *arguments: Any, cpu_s: float = 5.0) -> Any:
    return asyncio.run(call_bounded(function, *arguments, cpu_s=cpu_s))


def test_a_worker_is_reused_from_loop_to_loop_and_replaced_when_it_is_killed() -> None:
    first = call(os.getpid)
    assert call(os.getpid) == first != os.getpid()
    os.kill(first, signal.SIGKILL)
    assert call(os.getpid) not in (first, os.getpid())
    with pytest.raises(LimitExceededError, match="died 2 times: it was killed by SIGKILL"):
        call(os.kill, 0, signal.SIGKILL)  # its process group: the worker itself


def test_errors_and_limits_of_a_worker() -> None:
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        call(int, "no number")
    with pytest.raises(LimitExceededError, match="more than 2048 MB of memory"):
        call(bytearray, 1 << 40)
    started = time.process_time()
    with pytest.raises(LimitExceededError, match=r"more than 0\.5 s of processor time"):
        call(pow, 7, 7**11, cpu_s=0.5)  # in C: no signal handler of Python's would run
    assert time.process_time() - started < 0.5, "this process computes nothing"
    assert call(pow, 7, 2) == 49


@pytest.mark.slow
def test_a_cancelled_call_ends_its_worker() -> None:
    async def cancelled() -> list[psutil.Process]:
        before = set(psutil.Process().children())
        running = asyncio.create_task(call_bounded(pow, 7, 7**11, cpu_s=600.0))
        await asyncio.sleep(1.0)
        started = set(psutil.Process().children()) - before
        assert len(started) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return list(started)

    bounded_call._idle.clear()
    assert not any(process.is_running() for process in asyncio.run(cancelled()))


@pytest.mark.slow
def test_workers_end_with_their_parent() -> None:
    code = (
        "import asyncio, os, signal, psutil\n"
        "from rft_platform.judging.sandbox.bounded_call import call_bounded\n"
        "from rft_platform.judging.rules.mathematics import are_equal\n"
        "print(asyncio.run(call_bounded(are_equal, '1', '$1$', cpu_s=9)), flush=True)\n"
        "print(*[child.pid for child in psutil.Process().children()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    equal, worker = done.stdout.split()
    assert equal == "True", done.stderr
    psutil.wait_procs([psutil.Process(int(worker))] if psutil.pid_exists(int(worker)) else [], timeout=30)
    assert not psutil.pid_exists(int(worker)) or psutil.Process(int(worker)).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_cannot_start_is_an_error_of_the_machine() -> None:
    with pytest.raises(OSError, match=r"the process of a judge does not start: .*ModuleNotFoundError: No module named"):
        asyncio.run(call_bounded(pow, 7, 2, cpu_s=1.0, imports=("no_such_module",)))


def test_a_function_that_another_process_cannot_find_is_refused() -> None:
    def local() -> None:
        """Not at the top level of a module."""

    with pytest.raises(ValueError, match=r"local.*: define it at the top level of a module"):
        call(local)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["main thread", "running loop", "thread"])
def test_math_is_bounded_for_every_caller(where: str) -> None:
    tasks = {"t": Task("t", "sums", "?", "5", {"question": "?", "answer": "5"})}
    judged: list[Any] = []

    def judge() -> None:
        spec = build_judge("math", {"timeout_s": 1})
        judged.extend(judge_runs(run_rows([BOMB, "$5$", r"\boxed{3000000!}"]), tasks, spec))

    async def in_a_loop() -> None:
        judge()

    started = time.monotonic()
    if where == "running loop":
        asyncio.run(in_a_loop())
    elif where == "thread":
        thread = threading.Thread(target=judge)
        thread.start()
        thread.join()
    else:
        judge()
    assert [run.reward for run in judged] == [0.0, 1.0, 0.0]
    assert time.monotonic() - started < 60


def test_the_time_limit_of_the_taskset_bounds_a_rule() -> None:
    tasks = {"t": Task("t", "sums", "?", "5", {"question": "?", "answer": "5"})}
    spec = replace(build_judge("math", {"timeout_s": 600}), timeout_s=0.5)
    assert [run.reward for run in judge_runs(run_rows([BOMB, "$5$"]), tasks, spec)] == [0.0, 1.0]


@pytest.mark.slow
def test_a_reference_that_takes_too_long_is_an_error_of_the_task() -> None:
    tasks = {"t": Task("t", "sums", "?", "5", {"question": "?", "answer": "(" * 3000 + "5" + ")" * 3000})}
    spec = build_judge("math", {"timeout_s": 0.5})
    with pytest.raises(UserCodeError, match=r"the reference answer '\(\(.*' needed more than 0\.5 s of processor time"):
        judge_runs(run_rows(["$5$"]), tasks, spec)


@pytest.mark.slow
def test_any_text_crosses_the_pipe() -> None:
    for text in ("\ud83d", "\x00", "a\nb", "x" * 300_000, json.dumps({"a": "\u2028"})):
        assert call(are_equal, "5", text) is False
