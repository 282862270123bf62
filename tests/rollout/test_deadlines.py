"""Who is waited for: dynamic time-outs, batches that do without their slowest, workflows that refuse to end."""

import asyncio
import threading
import time
from typing import Any

import pytest

from rft_platform.common.errors import UserCodeError
from rft_platform.config.rollout_limits import Patience
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.workflow import WorkerWorkflow, Workflow, WorkflowOutput
from rft_platform.tasks.task import Task

from . import bad_agents
from .fake_engine import FakeEngine
from .samples import ask_blocking, ask_once, roll_out, tasks


def explore(engine: FakeEngine, workflow: Workflow, given: list[Task], **options: Any) -> RolloutBatch:
    settings = {"round": 1, "batch": 0, "repeat_times": 1, "sampling": SamplingParams(max_tokens=64), **options}
    return roll_out(engine, given, workflow, **settings)


class Late:
    """Hangs on some tasks for its first attempts, and knows what became of them."""

    def __init__(self, hanging: dict[str, int]) -> None:
        self.hanging = dict(hanging)
        self.cancelled: list[str] = []
        self.after: list[BaseException] = []

    async def __call__(self, task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        if self.hanging.get(task["question"], 0) > 0:
            self.hanging[task["question"]] -= 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(task["question"])
                raise
        return await ask_once(task, model)


@pytest.mark.parametrize(("policy", "rows", "whole"), [("complete", 16, 8), ("drop", 16, 8), ("partial", 18, 8)])
def test_a_batch_ends_without_its_slowest_tasks(engine: FakeEngine, policy: Any, rows: int, whole: int) -> None:
    slow = Late({"question 3": 1, "question 7": 1})
    patience = Patience(over_ratio=0.2, wait_after_min_s=0.3)
    began = time.monotonic()
    batch = explore(engine, slow, tasks(10), repeat_times=2, patience=patience, group_policy=policy)
    assert time.monotonic() - began < 10
    report = batch.report
    assert sorted(slow.cancelled) == ["question 3", "question 7"]
    assert (report.runs, report.failed, report.stopped, report.retried) == (20, 0, 2, 0)
    assert (len(batch.rows), report.rows, report.errors) == (rows, rows, {})
    if policy == "partial":
        assert (report.dropped_groups, report.partial_groups, report.dropped_for) == (0, 2, {})
    else:
        assert (report.dropped_groups, report.partial_groups, report.dropped_for) == (2, 0, {"stopped": 2})
    assert len({row.run_id for row in batch.rows}) == whole * 2 + report.partial_groups


@pytest.mark.slow
def test_all_runs_are_waited_for_until_enough_tasks_are_complete(engine: FakeEngine) -> None:
    late = Late({f"question {n}": 1 for n in range(3)})  # more than the ratio allows to leave out
    patience = Patience(over_ratio=0.2, wait_after_min_s=0.0)
    batch = explore(engine, late, tasks(10), patience=patience, timeout_s=1.0, max_retries=1)
    assert batch.report.failed == 0 and batch.report.stopped <= 2
    assert batch.report.rows >= 8 and batch.report.retried == 3 and len(late.cancelled) == 3


@pytest.mark.slow
def test_failed_and_stopped_tasks_are_counted_separately(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        if task["question"] == "question 0":
            raise RuntimeError("never works")
        if task["question"] == "question 1":
            await asyncio.Event().wait()
        return await ask_once(task, model)

    patience = Patience(over_ratio=0.5, wait_after_min_s=1.0)
    report = explore(engine, workflow, tasks(4), patience=patience, group_policy="drop", max_retries=1).report
    assert (report.failed, report.stopped, report.rows, report.retried) == (1, 1, 2, 1)
    assert report.dropped_for == {"failed": 1, "stopped": 1} and report.dropped_groups == 2


@pytest.mark.slow
def test_the_time_out_follows_the_batch(engine: FakeEngine) -> None:
    late = Late({"question 5": 1})
    began = time.monotonic()
    patience = Patience(dynamic_ratio=3.0)
    report = explore(engine, late, tasks(12), patience=patience, timeout_s=300.0, max_retries=1).report
    assert time.monotonic() - began < 60
    assert (report.failed, report.retried, report.rows) == (0, 1, 12)
    assert report.errors == {
        "TimeoutError: no result within 3 times the mean duration of an attempt (dynamic_timeout)": 1
    }


@pytest.mark.slow
def test_few_durations_are_no_measure(engine: FakeEngine) -> None:
    late = Late({"question 5": 1})
    patience = Patience(dynamic_ratio=3.0)
    report = explore(engine, late, tasks(8), patience=patience, timeout_s=2.0, max_retries=0).report  # 7 succeeded
    assert report.errors == {"TimeoutError: no result within 2 s": 1}


def test_a_stopped_thread_can_call_the_model_no_more(engine: FakeEngine) -> None:
    freed, refused = threading.Event(), []
    ended = threading.Semaphore(0)

    def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        client = model.get_openai_client().with_options(max_retries=0)
        messages: Any = [{"role": "user", "content": task["question"]}]
        if task["question"] == "question 0":
            freed.wait()
            try:
                client.chat.completions.create(model="m", messages=messages)
            except Exception as error:
                refused.append(error)
            ended.release()
        answer = client.chat.completions.create(model="m", messages=messages)
        return WorkflowOutput(response=answer.choices[0].message.content)

    patience = Patience(over_ratio=0.4, wait_after_min_s=0.2)
    report = explore(engine, workflow, tasks(3), patience=patience).report
    freed.set()
    assert ended.acquire(timeout=30)
    assert (report.stopped, report.rows, len(refused)) == (1, 2, 1)
    assert len(engine.chat_requests) == 2  # what the thread asked never went out


@pytest.mark.slow
def test_a_workflow_that_hides_its_cancellation_is_left_behind(engine: FakeEngine) -> None:
    errors: list[BaseException] = []

    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        while task["question"] == "question 0":
            try:
                await asyncio.sleep(0.05)
                await model.chat([{"role": "user", "content": "still there"}])
            except BaseException as error:
                errors.append(error)
                if isinstance(error, GeneratorExit):
                    raise
        return await ask_once(task, model)

    report = explore(engine, workflow, tasks(3), timeout_s=1.0, max_retries=0, group_policy="drop").report
    assert (report.rows, report.failed) == (2, 1)
    assert any(isinstance(error, asyncio.CancelledError) for error in errors)


@pytest.mark.slow
def test_threads_that_hang_take_no_room_from_others(engine: FakeEngine) -> None:
    over = threading.Event()

    def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        if int(task["question"].split()[1]) < 7:  # more than run at once
            over.wait()
        return ask_blocking(task, model)

    options = {"concurrency": 1, "timeout_s": 0.3, "max_retries": 0, "group_policy": "drop"}
    report = explore(engine, workflow, tasks(9), **options).report
    over.set()
    assert (report.rows, report.failed) == (2, 7)


def test_a_background_task_of_an_agent_does_not_delay_the_end_of_its_run(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rft_platform.rollout.runs.attempt.STOP_S", 0.2)
    left: list[asyncio.Task[None]] = []

    async def beats() -> None:
        while True:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        left.append(asyncio.create_task(beats()))
        return await ask_once(task, model)

    began = time.monotonic()
    assert explore(engine, workflow, tasks(2)).report.rows == 2
    assert time.monotonic() - began < 5 and not any(task.done() for task in left)
    assert caplog.text.count("explorer.workers: {kind: process}") == 1 and "2 tasks of workflows" in caplog.text


def test_a_workflow_that_cancels_itself_has_failed(engine: FakeEngine) -> None:
    async def workflow(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
        await model.chat([{"role": "user", "content": "hello"}])
        raise asyncio.CancelledError

    with pytest.raises(UserCodeError, match="the workflow cancelled itself"):
        explore(engine, workflow, tasks(2), max_retries=0)


@pytest.mark.slow
def test_stragglers_in_worker_processes_are_killed(engine: FakeEngine) -> None:
    given = [
        Task(f"task-{n}", "set", "", None, {"question": f"question {n}", "fault": "hang" if n == 2 else None})
        for n in range(5)
    ]
    workflow = WorkerWorkflow(f"{bad_agents.__name__}:unstoppable", count=2)
    patience = Patience(over_ratio=0.2, wait_after_min_s=0.1)
    report = explore(engine, workflow, given, patience=patience).report
    assert (report.stopped, report.rows, report.dropped_for) == (1, 4, {"stopped": 1})
