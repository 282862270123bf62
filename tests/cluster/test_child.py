"""Calls in a child process: results, errors, limits, what ends with it, and what it ends with."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft_platform.cluster.child import AnswerTimeoutError, CallError, Child, ChildError, LimitExceededError, Program
from tests.support.builders import alive

TESTS = Path(__file__).parents[1]
MODULE = "cluster.child_functions"


def start(**options: Any) -> Child:
    environment = {**options.pop("env", os.environ), "PYTHONPATH": str(TESTS)}
    return Child(MODULE, env=environment, **options)


@pytest.fixture
def child() -> Iterator[Child]:
    with start() as child:
        yield child


def wait_until_ended(*pids: int) -> None:
    for _ in range(1000):
        if not any(alive(pid) for pid in pids):
            return
        time.sleep(0.02)
    raise AssertionError(f"some of {pids} still run")


def test_values_errors_and_notes(child: Child) -> None:
    value = {"a": [1.5, None, "\ud83d\u2028\x00\n"], "b": {"c": True}}
    assert child.ask("echo", value) == value == asyncio.run(child.ask_async("echo", value))
    assert child.ask("echo", b'{"text": "of JSON"}') == {"text": "of JSON"}
    notes: list[int] = []
    assert child.ask("count", 3, on_note=notes.append) == child.ask("count", 1) == "done"
    assert notes == [0, 1, 2]
    with pytest.raises(CallError, match="ValueError: invalid literal") as raised:
        child.ask("builtins.int", "x")
    assert raised.value.kind == "ValueError"
    with pytest.raises(CallError, match=r"AttributeError: .*no_such_function"):
        child.ask("no_such_function")
    with pytest.raises(CallError, match="TypeError: Object of type PosixPath is not JSON"):
        child.ask("Path", "x")
    with pytest.raises(TypeError, match="not JSON serializable"):
        child.ask("echo", {1, 2})
    assert child.ask("pid") == child.pid, "no error ends the process"


@pytest.mark.parametrize("how", ["ask", "ask_async"])
def test_a_large_message_crosses_in_both_directions(child: Child, how: str) -> None:
    text = "x" * (20 << 20)
    answer = child.ask("echo", text) if how == "ask" else asyncio.run(child.ask_async("echo", text))
    assert answer == text


def test_output_of_the_function_does_not_disturb_the_answer(tmp_path: Path) -> None:
    with start(log=tmp_path / "log") as child:
        assert child.ask("shout", "not a message") == ""
        assert child.ask("pid") == child.pid
    assert (tmp_path / "log").read_text().count("not a message") == 2


def test_a_forked_child_of_the_function_cannot_answer(child: Child) -> None:
    assert child.ask("forked") == child.ask("pid") == child.pid


def test_processor_time_and_memory_are_limited() -> None:
    with start(memory_mb=200) as child:
        with pytest.raises(LimitExceededError, match="more than 200 MB of memory"):
            child.ask("builtins.bytearray", 1 << 32)
        assert child.is_alive and child.ask("limits")["core"] == 0
        with pytest.raises(
            LimitExceededError, match=r"builtins\.pow in the process .*: it needed more than 0\.3 s of processor"
        ):
            child.ask("builtins.pow", 7, 7**11, cpu_s=0.3)
        assert not child.is_alive


@pytest.mark.parametrize("how", ["ask", "ask_async"])
def test_wall_time_is_limited(child: Child, how: str) -> None:
    child.ask("pid")
    with pytest.raises(AnswerTimeoutError, match=r"stop in the process .*: it did not answer within 0\.3 s"):
        child.ask("stop", wall_s=0.3) if how == "ask" else asyncio.run(child.ask_async("stop", wall_s=0.3))
    assert not psutil.pid_exists(child.pid)
    with pytest.raises(ChildError, match="was ended"):
        child.ask("pid")


def test_an_error_names_how_the_process_ended_and_what_it_printed() -> None:
    with start() as child, pytest.raises(ChildError, match="exit code 3; it printed: no space left on the disk"):
        child.ask("complain_and_exit", 3)
    with start() as child, pytest.raises(ChildError, match=r"it was killed by SIGKILL \(the kernel does this"):
        child.ask("os.kill", 0, signal.SIGKILL)
    with (
        Child("no_such_module") as child,
        pytest.raises(ChildError, match=r"start of no_such_module: .*No module") as e,
    ):
        child.ask("pid")
    assert not e.value.started and "import_module" in e.value.tail
    with pytest.raises(OSError, match="No such file"):
        Child(MODULE, python="/nowhere/python")
    with Child(MODULE, python="/bin/true") as child, pytest.raises(ChildError, match="ended with exit code 0"):
        child.ask("pid")


async def test_a_cancelled_call_kills_the_process(child: Child) -> None:
    call = asyncio.create_task(child.ask_async("builtins.pow", 7, 7**11))
    await asyncio.sleep(0.3)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled() and not psutil.pid_exists(child.pid)


def test_descendants_in_other_sessions_are_killed_too(child: Child, tmp_path: Path) -> None:
    child.send("start_children", str(tmp_path / "pids"))
    descendants = pids_in(tmp_path / "pids")
    child.kill()
    assert not psutil.pid_exists(child.pid)
    wait_until_ended(*descendants)


def pids_in(file: Path, count: int = 2) -> list[int]:
    for _ in range(1000):
        if file.exists() and len(file.read_text().split()) == count:
            return [int(pid) for pid in file.read_text().split()]
        time.sleep(0.02)
    raise AssertionError("the function did not start its children")


def test_a_child_ends_with_its_object() -> None:
    child = start()
    pid = child.ask("pid")
    del child
    assert not psutil.pid_exists(pid)


PARENT = """
import sys
from rft_platform.cluster.child import Child
child = Child({module!r})
child.send("start_children", {pids!r})
print(child.pid, flush=True)
input()
"""


def test_a_child_and_its_group_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    code = PARENT.format(module=MODULE, pids=str(tmp_path / "pids"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child, (member, daemon) = int(parent.stdout.readline()), pids_in(tmp_path / "pids")
        parent.kill()
    wait_until_ended(child, member)
    psutil.Process(daemon).kill()  # it has its own session, and nobody is left that knows it


@pytest.mark.slow
def test_another_interpreter_gets_only_this_package(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    with start(python=str(tmp_path / "env" / "bin" / "python")) as child:
        prefix, package, first = child.ask("interpreter")
        assert prefix == str(tmp_path / "env") and Path(package).parents[1] == TESTS.parent and first == str(TESTS)
        with pytest.raises(CallError, match="No module named 'psutil'"):
            child.ask("builtins.__import__", "psutil")


def test_only_the_given_environment_arrives() -> None:
    with start(env={"LC_ALL": "C"}) as child:
        assert child.ask("limits")["environment"] == ["LC_ALL", "PYTHONPATH"]


def test_a_process_forked_from_this_one_neither_uses_nor_ends_its_children(child: Child) -> None:
    child.ask("pid")
    stop, busy = threading.Event(), threading.Thread(target=lambda: [child.ask("pid") for _ in iter(stop.is_set, True)])
    busy.start()
    try:
        forked = os.fork()
        if forked == 0:
            code = 1
            try:
                child.ask("pid")
            except ChildError:
                child.kill()
                with start() as own:
                    code = 0 if not child.is_alive and own.ask("pid") == own.pid else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    finally:
        stop.set()
        busy.join()
    assert child.is_alive and child.ask("pid") == child.pid


def test_threads_start_and_end_children_at_the_same_time() -> None:
    pids: list[int] = []

    def work() -> None:
        with start() as own:
            pids.extend(own.ask("pid") for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 80 and len(set(pids)) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_child_survives_the_thread_that_started_it() -> None:
    started: list[Child] = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    with started[0] as child:
        assert child.ask("pid") == child.pid


def test_a_program_gets_its_input_and_its_output_is_limited() -> None:
    text = b"line\n" * 200_000
    done = Program(["cat"], wall_s=60, stdin=text).run()
    assert done.ok and done.stdout == text
    assert Program(["true"], wall_s=60, stdin=text).run().ok, "a program need not read its input"
    long = Program(["yes"], wall_s=60, output_bytes=1000).run()
    assert long.too_long and not long.ok and len(long.stdout) == 1000
    failed = Program(["sh", "-c", "echo no >&2; exit 3"], wall_s=60).run()
    assert (failed.exit_code, failed.stderr, failed.ok) == (3, b"no\n", False)
    with pytest.raises(OSError, match="No such file"):
        Program(["/nowhere/program"], wall_s=60).run()


async def test_a_program_ends_at_its_wall_time_and_when_it_is_cancelled(tmp_path: Path) -> None:
    command = ["sh", "-c", f"setsid sleep 600 & echo $! > {tmp_path}/pid; wait"]
    late = await Program(command, wall_s=0.5).run_async()
    assert late.timed_out and not late.ok
    wait_until_ended(*pids_in(tmp_path / "pid", 1))
    (tmp_path / "pid").unlink()
    running = asyncio.create_task(Program(command, wall_s=600).run_async())
    await asyncio.to_thread(pids_in, tmp_path / "pid", 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    wait_until_ended(*pids_in(tmp_path / "pid", 1))
