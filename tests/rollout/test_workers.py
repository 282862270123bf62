"""Attempts in worker processes: the same rows as in this process, and nothing that user code does reaches further."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.schema import ROLLOUT_SCHEMA
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.workflow import WorkerWorkflow, Workflow, resolve_workflow
from rft_platform.tasks.task import Task
from tests.support.builders import alive

from . import bad_agents, samples
from .fake_engine import FakeEngine
from .samples import roll_out

pytestmark = pytest.mark.slow
ANSWER = f"{bad_agents.__name__}:answer"
MEASURED = ("created_at", "duration_s", "msg_id")


def tasks(faults: Sequence[str | None], **more: Any) -> list[Task]:
    return [
        Task(f"task-{n}", "set", f"question {n}", str(n), {"question": f"question {n}", "fault": fault, **more})
        for n, fault in enumerate(faults)
    ]


def explore(engine: FakeEngine, workflow: Workflow, given: Sequence[Task], **options: Any) -> RolloutBatch:
    settings = {"round": 1, "batch": 0, "repeat_times": 1, "sampling": SamplingParams(max_tokens=64), **options}
    return roll_out(engine, given, workflow, **settings)


def facts(rows: Sequence[RolloutRow]) -> list[dict[str, Any]]:
    """All columns of the rows that do not depend on time."""
    return [{name: getattr(row, name) for name in ROLLOUT_SCHEMA.names if name not in MEASURED} for row in rows]


def workers_of(pid: int) -> list[psutil.Process]:
    """Worker processes below a process."""
    return [child for child in psutil.Process(pid).children(recursive=True) if is_worker(child)]


def is_worker(process: psutil.Process) -> bool:
    try:
        return any("rft_platform.rollout.workers.worker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "arguments"), [(f"{samples.__name__}:Custom", {"turns": 3}), (f"{samples.__name__}:ask_blocking", {})]
)
def test_rows_are_those_of_this_process(engine: FakeEngine, name: str, arguments: dict[str, Any]) -> None:
    given, options = tasks([None] * 3), {"repeat_times": 2}
    here = explore(engine, resolve_workflow(name, arguments), given, **options)
    there = explore(engine, WorkerWorkflow(name, arguments, count=2), given, **options)
    assert facts(there.rows) == facts(here.rows) and len(here.rows) >= 6
    assert there.report.failed == 0


def test_what_user_code_does_to_its_process_fails_its_own_run_alone(engine: FakeEngine, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    faults = [None, "raise", "exit", "os-exit", "abort", "leave children", "cancel", None, "fork", "shout", "hang in C"]
    given = tasks(faults, pids=str(pids))
    workflow = WorkerWorkflow(ANSWER, count=4, log_folder=tmp_path)
    batch = explore(engine, workflow, given, timeout_s=4.0, max_retries=0, group_policy="drop")
    sound = {n for n, fault in enumerate(faults) if fault in (None, "fork", "shout")}
    assert {row.task_id for row in batch.rows} == {f"task-{n}" for n in sound}
    for row in batch.rows:
        assert row.run_output["question"] == row.messages[0]["content"] == f"question {row.task_id[5:]}"
    causes = dict(batch.report.errors)
    assert causes["LookupError: no such tool"] == 1
    assert causes.pop("TimeoutError: no result within 4 s") == 2
    assert causes["SystemExit: 3"] == 1
    assert causes["WorkerDied: the worker process ended with exit code 7 during the run"] == 1
    assert causes["WorkerDied: the worker process was killed by SIGSEGV during the run"] == 1
    assert causes["RuntimeError: the workflow cancelled itself; the platform did not cancel it"] == 1
    assert sum(batch.report.errors.values()) == batch.report.failed == len(faults) - len(sound)
    assert batch.report.dropped_for == {"failed": 7}
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2 and not any(alive(pid) for pid in left)
    assert workers_of(os.getpid()) == []
    assert "not a message" in (tmp_path / "rollout-workers.log").read_text()


def test_a_worker_that_dies_is_reported_in_one_line_with_its_run(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rft_platform.rollout")
    batch = explore(engine, WorkerWorkflow(ANSWER, count=2), tasks(["kill", "os-exit", None]), max_retries=0)
    assert {row.task_id for row in batch.rows} == {"task-2"}
    first_pass = {record.getMessage() for record in caplog.records}
    for number, how in enumerate(
        ["was killed by SIGKILL (the kernel does this when memory runs out)", "ended with exit code 7"]
    ):
        run = f"run r0001-b0000-t0000{number}-000 of task task-{number}, attempt 0 failed"
        assert f"{run}: WorkerDied: the worker process {how} during the run" in first_pass


@pytest.mark.parametrize(("retries", "failed"), [(1, 0), (0, 1)])
def test_a_stopped_worker_is_replaced_and_its_run_repeated_or_failed(
    engine: FakeEngine, tmp_path: Path, retries: int, failed: int
) -> None:
    marker, started = tmp_path / "pid", time.monotonic()
    given = tasks([None, "stop once", None], pids=str(marker))
    workflow = WorkerWorkflow(ANSWER, count=2, log_folder=tmp_path)
    batch = explore(engine, workflow, given, timeout_s=3.0, max_retries=retries, group_policy="drop")
    assert time.monotonic() - started < 60
    assert batch.report.failed == failed
    assert dict(batch.report.errors) == {"TimeoutError: no result within 3 s": 1}  # attempts, also of repeated runs
    assert {row.task_id for row in batch.rows} == {"task-0", "task-2"} | (set() if failed else {"task-1"})
    assert not alive(int(marker.read_text())) and workers_of(os.getpid()) == []


def test_a_workflow_that_workers_cannot_load_is_the_users_error(engine: FakeEngine) -> None:
    with pytest.raises(UserError, match=r"cannot run 'no.such.agent:run': workflow .* cannot import no.such.agent"):
        explore(engine, WorkerWorkflow("no.such.agent:run"), tasks([None]))
    with pytest.raises(UserError, match="no-python: cannot be run"):
        explore(engine, WorkerWorkflow(ANSWER, python="/nowhere/no-python"), tasks([None]))
    with pytest.raises(UserError, match=r"workflow_args .* worker processes need JSON values"):
        explore(engine, WorkerWorkflow(f"{samples.__name__}:Custom", {"turns": {1}}), tasks([None]))
    with pytest.raises(UserCodeError, match=r"task task-0 cannot be sent .* worker processes need JSON values"):
        explore(engine, WorkerWorkflow(ANSWER, count=1), tasks([None], extra={1, 2}), max_retries=0)
    assert workers_of(os.getpid()) == []


KILLED_AT_ITS_START = """
import os, signal
from pathlib import Path
from tests.rollout.bad_agents import answer
left = Path(__file__).with_name("left")
if count := int(left.read_text()):
    left.write_text(str(count - 1))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kills", [2, 3])
def test_a_worker_that_is_killed_at_its_start_is_replaced_twice(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    (tmp_path / "killed_agent.py").write_text(KILLED_AT_ITS_START)
    (tmp_path / "left").write_text(str(kills))
    monkeypatch.syspath_prepend(tmp_path)
    workflow = WorkerWorkflow("killed_agent:answer", count=1)
    if kills < 3:
        batch = explore(engine, workflow, tasks([None]), max_retries=0)
        assert batch.report.failed == 0 and batch.report.errors == {}
    else:
        with pytest.raises(UserError, match=r"was killed by SIGKILL \(the kernel .* at its start"):
            explore(engine, workflow, tasks([None]))
    assert workers_of(os.getpid()) == []


def test_the_error_names_the_cause_if_every_run_in_workers_fails(engine: FakeEngine) -> None:
    with pytest.raises(
        UserCodeError, match=r"all 2 runs failed, the last with LookupError: no such tool \(.*bad_agents"
    ):
        explore(engine, WorkerWorkflow(ANSWER, count=1), tasks(["raise"] * 2), max_retries=0, group_policy="drop")


def test_a_worker_imports_only_light_modules_of_the_platform() -> None:
    """Another environment has none of these; what ``openai`` itself brings does not count."""
    code = """
import sys
import openai
theirs = set(sys.modules)
import rft_platform.cluster.child
import rft_platform.rollout.workers.worker
import rft_platform.rollout.recording.clients
import rft_platform.rollout.workflows.dialogue
import rft_platform.rollout.workflows.calculator
import rft_platform.common.user_code
ours = {name.partition('.')[0] for name in set(sys.modules) - theirs} - set(sys.stdlib_module_names)
print(sorted(name for name in ours if not name.startswith('_')))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['rft_platform']"
    code = """
import sys
import rft_platform.rollout.recording.gateway
print({'psutil', 'fastapi', 'pandas', 'httpx'} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"  # model.base_url needs uvicorn and starlette alone


TESTS = Path(__file__).parents[1]
PARENT = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import WorkerWorkflow
from rollout.fake_engine import FakeEngine
from rollout.test_workers import ANSWER, tasks

if __name__ == "__main__":
    engine = FakeEngine()
    engine.serve()
    given = tasks(["leave children"] * 3, pids={pids!r})
    run_rollouts(engine, given, WorkerWorkflow(ANSWER, count=3), round=1, batch=0, repeat_times=1,
                 sampling=SamplingParams(max_tokens=64))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path: Path, how: signal.Signals) -> None:
    pids, script = tmp_path / "pids", tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(TESTS), root=str(TESTS.parent), pids=str(pids)))
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True) as parent:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 6)
        workers = workers_of(parent.pid)
        assert len(workers) == 3
        children = [int(pid) for pid in pids.read_text().split()]
        daemons = [pid for pid in children if os.getsid(pid) == pid]  # nobody is left who knows of these
        parent.send_signal(how)
        _, said = parent.communicate(timeout=30)
    assert ("KeyboardInterrupt" in said) == (how is signal.SIGINT)
    wait_until(lambda: not any(alive(worker.pid) for worker in workers), 10)
    wait_until(lambda: not any(alive(pid) for pid in children if how is signal.SIGINT or pid not in daemons), 10)
    for pid in daemons if how is signal.SIGKILL else []:
        psutil.Process(pid).kill()
