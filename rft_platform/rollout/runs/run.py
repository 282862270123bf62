"""One run of a workflow: its identity, its result, and its rows."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rft_platform.common.errors import EngineError
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.record import (
    LARGEST_TOP_K,
    METRIC_EXPECTED,
    POLICY_REWARD,
    TRUNCATED_METRIC,
    ModelCall,
    RolloutRow,
    row_id,
    valid_text,
)
from rft_platform.experience.responses import encode_response
from rft_platform.inference.interface import EngineStatus, SamplingParams, greedy
from rft_platform.rollout.recording.history import derive_seed, group_id, record_key, run_id
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
    greedy: bool = False  # decoded with temperature 0

    @property
    def group_id(self) -> str:
        """Id shared by the runs of the task."""
        return group_id(self.round, self.batch, self.index)

    @property
    def run_id(self) -> str:
        """Id of the run, the same for every attempt."""
        return run_id(self.round, self.batch, self.index, self.repeat)

    @property
    def record_key(self) -> str:
        """Name of the run for an agent outside this process."""
        return record_key(self.round, self.batch, self.index, self.repeat)

    def sampling(self, usual: SamplingParams) -> SamplingParams:
        """The sampling parameters of the run: ``usual``, or greedy decoding."""
        return greedy(usual) if self.greedy else usual

    def seed(self, base: int, attempt: int) -> int:
        """Sampling seed of an attempt. Another attempt has another seed, so that a retry differs from a failure."""
        return derive_seed(base, self.round, self.batch, self.index, self.repeat, attempt)


@dataclass(frozen=True, slots=True)
class ExploreBatch:
    """What to roll out: ``repeat_times`` runs of every task. A part of a batch has the tasks at some ``places``."""

    round: int
    number: int  # number of the batch within its round, from 0
    tasks: Sequence[Task]
    repeat_times: int
    seed: int
    places: Sequence[int] = ()  # positions of the tasks in the whole batch; empty: this is the whole batch
    first_prompt: int = 0  # tasks in the parts before this part
    greedy_first: bool = False  # the first run of each task is decoded greedily

    def runs(self) -> list[Run]:
        """Return all runs; the runs of a task are adjacent."""
        return [
            Run(self.round, self.number, index, repeat, task, self.greedy_first and repeat == 0)
            for index, task in zip(self.places or range(len(self.tasks)), self.tasks, strict=True)
            for repeat in range(self.repeat_times)
        ]

    def parts(self) -> dict[str, "ExploreBatch"]:
        """The part of each taskset, by name; together they have the runs of this batch, with the same ids and seeds."""
        places: dict[str, list[int]] = {}
        for place, task in enumerate(self.tasks):
            places.setdefault(task.taskset, []).append(place)
        found, first = {}, 0
        for name, own in places.items():
            found[name] = replace(self, tasks=[self.tasks[place] for place in own], places=own, first_prompt=first)
            first += len(own)
        return found


def as_output(returned: Any, calls: list[ModelCall]) -> tuple[WorkflowOutput, list[ModelCall]]:
    """Convert what a workflow returned to an output and the calls that represent the run.

    If a workflow returns a ``WorkflowOutput`` (or an object with its attributes), all recorded ``calls`` count. If it
    returns a list of extracted calls, only these count, each once, and a policy's reward is the last ``reward`` that
    was set on one of its calls. Raises TypeError or ValueError for anything else.
    """
    if isinstance(returned, list) and all(isinstance(call, ModelCall) for call in returned):
        kept = _each_once(returned)
        rewards: Any = {call.policy: call.reward for call in returned if call.reward is not None}
        reward = rewards.pop(DEFAULT_POLICY, None)
        output = WorkflowOutput(reward, returned[-1].response.get("content"), rewards=rewards)
    elif all(hasattr(returned, name) for name in ("reward", "response", "metrics")):
        rewards = getattr(returned, "rewards", None)
        output, kept = WorkflowOutput(returned.reward, returned.response, returned.metrics, rewards), calls
    else:
        hint = "return WorkflowOutput(response=...)"
        raise TypeError(f"the workflow returned {type(returned).__name__}, expected WorkflowOutput: {hint}")
    if output.reward is not None and not _is_finite(output.reward):
        raise ValueError(f"the workflow returned reward {output.reward!r}, expected a finite number")
    for name, value in (output.rewards or {}).items():
        if not _is_finite(value):
            raise ValueError(f"the workflow returned reward {value!r} for {name!r}, expected a finite number")
    return output, kept


def _is_finite(value: Any) -> bool:
    """Whether the value is a finite number, of whatever package."""
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _each_once(experiences: list[ModelCall]) -> list[ModelCall]:
    """Remove repeated experiences. Raises ValueError for an empty list, and for copies of one experience."""
    if not experiences:
        raise ValueError(
            "the workflow returned an empty list: return the experiences to train on, as "
            "model.extract_experience_from_history() gives them (without those that an earlier extraction cleared)"
        )
    kept = list({id(call): call for call in experiences}.values())
    times = Counter((call.order, call.choice) for call in kept)
    (order, choice), most = times.most_common(1)[0]
    if most > 1:
        raise ValueError(
            f"the workflow returned {most} copies of one experience (call {order}, choice {choice}): return the "
            "objects that model.extract_experience_from_history() gave, each once"
        )
    return kept


@dataclass(slots=True)
class RunResult:
    """Result of a run that succeeded: plain values, so that it can come from another process."""

    calls: list[ModelCall]
    reward: float | None = None
    response: Any = None  # encoded by ``encode_response``
    metrics: dict[str, float] = field(default_factory=dict)
    truncated: bool = False  # the run ended because its next prompt was longer than the context

    @classmethod
    def of(cls, returned: Any, calls: list[ModelCall], policies: Collection[str] = ()) -> "RunResult":
        """Return the result of a run whose workflow made ``calls`` and returned the value ``returned``.

        ``policies`` are the names of further policies. If the workflow gives no reward, the reward of each policy is
        the sum of its step rewards. Raises TypeError or ValueError if the returned value cannot be used, and
        EngineError if the engine aborted an answer.
        """
        output, kept = as_output(returned, calls)
        if not kept:
            raise ValueError("the workflow returned without a recorded model call: was another client used?")
        _check_calls(kept)
        reward = total_step_reward(kept) if output.reward is None else float(output.reward)
        rewards = {**_step_rewards(kept), **(output.rewards or {})}
        if unknown := sorted(rewards.keys() - set(policies)):
            known = ", ".join(policies) or "none"
            raise ValueError(
                f"the workflow returned rewards for {', '.join(unknown)}; the further policies are: {known}"
            )
        metrics = {valid_text(str(name)): _metric(name, value) for name, value in (output.metrics or {}).items()}
        metrics |= {POLICY_REWARD + name: float(value) for name, value in rewards.items()}
        return cls(kept, reward, encode_response(output.response), metrics)

    @classmethod
    def cut_off(cls, calls: list[ModelCall], reward: float) -> "RunResult":
        """Return the result of a run that exceeded the context; ``reward`` is used if the run has no step rewards."""
        _check_calls(calls)
        earned = total_step_reward(calls)
        metrics = {POLICY_REWARD + name: value for name, value in _step_rewards(calls).items()}
        metrics[TRUNCATED_METRIC] = 1.0
        return cls(calls, reward if earned is None else earned, None, metrics, truncated=True)


def _metric(name: Any, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"the metric {name!r} is a {type(value).__name__}; expected {METRIC_EXPECTED}") from None


def _check_calls(calls: Sequence[ModelCall]) -> None:
    aborted = [call.msg_id for call in calls if call.finish_reason == "abort"]
    if aborted:
        raise EngineError(f"the engine aborted {len(aborted)} answers of the run, the first is {aborted[0]}")
    for call in calls:
        if call.step_reward is not None and not _is_finite(call.step_reward):
            raise ValueError(f"the step reward of call {call.order} is {call.step_reward!r}, expected a finite number")


def total_step_reward(calls: Sequence[ModelCall], policy: str = DEFAULT_POLICY) -> float | None:
    """Sum of a policy's step rewards; None if there are none. A call with several choices counts once."""
    of_policy = [call for call in calls if call.policy == policy]
    steps = {call.order: float(call.step_reward) for call in of_policy if call.step_reward is not None}
    return sum(steps.values()) if steps else None


def _step_rewards(calls: Sequence[ModelCall]) -> dict[str, float]:
    """Sum of step rewards of each further policy that has step rewards."""
    sums = {name: total_step_reward(calls, name) for name in {call.policy for call in calls} - {DEFAULT_POLICY}}
    return {name: total for name, total in sums.items() if total is not None}


def rows_of_run(
    run: Run,
    result: RunResult,
    status: EngineStatus,
    attempt: int = 0,
    further: Mapping[str, EngineStatus] | None = None,
) -> list[RolloutRow]:
    """Return one row per recorded choice, steps numbered from 0; the last row holds output, reward and run metrics.

    ``status``: status of the first policy's engine; ``further``: status of further policies' engines, by policy name.
    """
    served = {DEFAULT_POLICY: status, **(further or {})}
    steps = {order: step for step, order in enumerate(sorted({call.order for call in result.calls}))}
    rows = [
        row_of_call(run, steps[call.order], call, served[call.policy], attempt)
        for call in sorted(result.calls, key=lambda c: (c.order, c.choice))
    ]
    last = rows[-1]
    last.run_output, last.run_reward = result.response, result.reward
    last.call.metrics |= result.metrics
    last.truncated = last.truncated or result.truncated
    return rows


def row_of_call(run: Run, step: int, call: ModelCall, status: EngineStatus, attempt: int = 0) -> RolloutRow:
    """Return the row of one recorded choice, without output and reward of the run."""
    return RolloutRow(
        row_id=row_id(run.run_id, step, call.choice),
        task_id=run.task.task_id,
        taskset=run.task.taskset,
        group_id=run.group_id,
        run_id=run.run_id,
        step=step,
        round=run.round,
        engine=status.engine,
        template_hash=status.template_hash,
        call=_as_stored(call, status),
        loss_mask=[not call.constrained] * len(call.response_ids),
        truncated=call.finish_reason == "length",
        attempt=attempt,
    )


def _as_stored(call: ModelCall, status: EngineStatus) -> ModelCall:
    """A copy of a call in the form that the store accepts. Without a version in the answer, the engine's is used."""
    return replace(
        call,
        policy_version=status.policy_version if call.policy_version is None else call.policy_version,
        top_k=min(call.top_k, LARGEST_TOP_K),
        metrics=dict(call.metrics or {}),
        step_reward=None if call.step_reward is None else float(call.step_reward),
    )
