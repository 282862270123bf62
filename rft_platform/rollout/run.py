"""One run of a workflow, and the rows it leaves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft_platform.errors import EngineError
from rft_platform.experience.record import RolloutRow, row_id
from rft_platform.experience.responses import encode_response
from rft_platform.inference.interface import EngineStatus, SamplingParams
from rft_platform.rollout.history import RecordedCall
from rft_platform.rollout.identity import derive_seed, group_id, run_id
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Run:
    """The ``repeat``-th run of the ``index``-th task of an explore batch."""

    round: int
    batch: int
    index: int
    repeat: int
    task: Task

    @property
    def group_id(self) -> str:
        """Shared by the runs of the task."""
        return group_id(self.round, self.batch, self.index)

    @property
    def run_id(self) -> str:
        """The same for every attempt."""
        return run_id(self.round, self.batch, self.index, self.repeat)

    def seed(self, base: int, attempt: int) -> int:
        """Sampling seed; another attempt samples anew, or it could only fail in the same way."""
        return derive_seed(base, self.round, self.batch, self.index, self.repeat, attempt)


@dataclass(frozen=True, slots=True)
class ExploreBatch:
    """What to roll out: ``repeat_times`` runs of every task."""

    round: int
    number: int  # of the batch within its round, from 0
    tasks: Sequence[Task]
    repeat_times: int
    sampling: SamplingParams
    seed: int

    def runs(self) -> list[Run]:
        """All runs, those of a task side by side."""
        return [
            Run(self.round, self.number, index, repeat, task)
            for index, task in enumerate(self.tasks)
            for repeat in range(self.repeat_times)
        ]


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """How hard to try."""

    concurrency: int
    timeout_s: float  # of one attempt
    max_retries: int  # attempts of a run beyond the first
    passes: int = 1  # runs that failed are tried anew, all attempts, in each further pass


def as_output(returned: Any, calls: list[RecordedCall]) -> tuple[WorkflowOutput, list[RecordedCall]]:
    """What a workflow returned, as an output and the calls that stand for the run.

    A workflow may return a ``WorkflowOutput`` (or an object with its attributes): then all recorded ``calls`` count.
    Or a list of the calls it extracted itself: then these count, and the last one's ``reward`` is the run's.
    Raises TypeError or ValueError for anything else.
    """
    if isinstance(returned, list) and returned and all(isinstance(call, RecordedCall) for call in returned):
        last = returned[-1]
        return WorkflowOutput(reward=last.reward, response=last.response.get("content")), returned
    if not all(hasattr(returned, name) for name in ("reward", "response", "metrics")):
        raise TypeError(f"the workflow returned {type(returned).__name__}, expected WorkflowOutput")
    if returned.reward is not None and not math.isfinite(returned.reward):
        raise ValueError(f"the workflow returned reward {returned.reward}, expected a finite number")
    return WorkflowOutput(returned.reward, returned.response, returned.metrics), calls


def rows_of_run(
    run: Run, returned: Any, calls: list[RecordedCall], status: EngineStatus, attempt: int = 0
) -> list[RolloutRow]:
    """One row a recorded choice, steps numbered from 0; output, reward and metrics stand on the last row."""
    output, kept = as_output(returned, calls)
    if not kept:
        raise ValueError("the workflow returned without a recorded model call: was another client used?")
    aborted = [call.msg_id for call in kept if call.finish_reason == "abort"]
    if aborted:
        raise EngineError(f"the engine aborted {len(aborted)} answers of the run, the first is {aborted[0]}")
    steps = {order: step for step, order in enumerate(sorted({call.order for call in kept}))}
    rows = [
        row_of_call(run, steps[call.order], call, status, attempt)
        for call in sorted(kept, key=lambda c: (c.order, c.choice))
    ]
    last = rows[-1]
    last.run_output = encode_response(output.response)
    last.run_reward = None if output.reward is None else float(output.reward)
    last.metrics = {**last.metrics, **{name: float(value) for name, value in (output.metrics or {}).items()}}
    return rows


def row_of_call(run: Run, step: int, call: RecordedCall, status: EngineStatus, attempt: int = 0) -> RolloutRow:
    """The row of one recorded choice; output and reward of the run are not its business."""
    return RolloutRow(
        row_id=row_id(run.run_id, step, call.choice),
        task_id=run.task.task_id,
        taskset=run.task.taskset,
        group_id=run.group_id,
        run_id=run.run_id,
        step=step,
        msg_id=call.msg_id,
        round=run.round,
        policy_version=status.policy_version if call.policy_version is None else call.policy_version,
        engine=status.engine,
        template_hash=status.template_hash,
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        logprobs=call.logprobs,
        loss_mask=[True] * len(call.response_ids),
        temperature=call.temperature,
        top_p=call.top_p,
        top_k=call.top_k,
        finish_reason=call.finish_reason,
        truncated=call.finish_reason == "length",
        messages=call.messages,
        tools=call.tools,
        response=call.response,
        metrics=dict(call.metrics),
        created_at=call.created_at,
        duration_s=call.duration_s,
        attempt=attempt,
        env_state_hash=call.env_state_hash,
        policy=call.policy,
        step_reward=call.step_reward,
    )
