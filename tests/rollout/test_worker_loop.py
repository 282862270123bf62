"""A worker's attempts share an event loop: a client that a library keeps for later would be bound to a closed one."""

from pathlib import Path

import pytest

from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import WorkerWorkflow

from .fake_engine import FakeEngine
from .samples import tasks


@pytest.mark.slow
def test_attempts_share_a_loop_but_no_tasks(engine: FakeEngine) -> None:
    workflow = WorkerWorkflow(f"{Path(__file__).with_name('loop_agent.py')}:keep_the_loop", count=1)
    batch = run_rollouts(
        engine, tasks(3), workflow, round=1, batch=0, repeat_times=1, sampling=SamplingParams(max_tokens=16)
    )
    assert [(row.metrics["loops"], row.metrics["alive"]) for row in batch.rows] == [(1.0, 0.0)] * 3


@pytest.mark.slow
def test_a_worker_with_a_task_that_cannot_be_stopped_is_replaced(engine: FakeEngine) -> None:
    workflow = WorkerWorkflow(f"{Path(__file__).with_name('loop_agent.py')}:leave_a_stubborn_task", count=1)
    batch = run_rollouts(
        engine, tasks(2), workflow, round=1, batch=0, repeat_times=1, sampling=SamplingParams(max_tokens=16)
    )
    first, second = (row.metrics["pid"] for row in batch.rows)
    assert first != second
