"""Roll out a workflow on a batch of tasks and report counts, costs and errors.

Attempts in this process: async workflows share the event loop, others have a thread each. Workflows of one model call,
such as the built-in one, are sent in whole batches.

Invariants:

- A run gives all rows of one attempt or none: a failed attempt leaves no row.
- A failed run ends no other run; only a lost engine ends the batch.
- A retry has the run's id and order, and its own seed; a repeated batch therefore has the same ids and seeds.
- Weights do not change while a batch runs: a version of each policy sampled every token of the batch.
- When a batch ends, no code of an agent can call the model any more.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from time import perf_counter, process_time
from typing import Any

from rft_platform.common.errors import NAMED, EngineError, RftError, UserCodeError, UserError
from rft_platform.config.rollout_limits import GroupPolicy, RolloutLimits, may_train
from rft_platform.experience.file_names import round_key
from rft_platform.experience.record import RolloutRow
from rft_platform.inference.interface import EngineStatus, PolicyEngine, SamplingParams
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.rollout.recording.clients import RecordingClients  # imports openai
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.policy_routes import FurtherPolicies
from rft_platform.rollout.runner.report import RolloutBatch, RolloutReport, Tally, error_text, row_counts, user_location
from rft_platform.rollout.runner.single_turn import InFlight, run_in_flight, run_single_turn
from rft_platform.rollout.runs.attempt import AttemptStatistics, make_attempt
from rft_platform.rollout.runs.run import ExploreBatch, Run, RunResult
from rft_platform.rollout.workflow import LocalWorkflow, SingleTurnWorkflow, WorkerWorkflow, Workflow
from rft_platform.tasks.task import Task


class InProcessExecutor:
    """Makes attempts in this process. The caller limits the number of concurrent attempts."""

    def __init__(
        self,
        engine: PolicyEngine,
        status: EngineStatus,
        workflow: LocalWorkflow,
        sampling: SamplingParams,
        limits: RolloutLimits,
        auxiliary_models: Mapping[str, Any] | None,
        further: FurtherPolicies,
    ) -> None:
        replicas = engine.replicas if isinstance(engine, EnginePool) else None
        self._clients = RecordingClients(engine.base_url, limits.timeout_s, replicas, engine.api_key)
        self._model = status.model_path
        self._workflow = workflow
        self._sampling = sampling
        self._truncated_reward = limits.truncated_reward
        self._auxiliary_models = auxiliary_models
        self._policies = further.routes

    async def __aenter__(self) -> "InProcessExecutor":
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._clients.close()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator["InProcessExecutor"]:
        """In-process execution has no slot limit."""
        yield self

    async def attempt(self, run: Run, seed: int, statistics: AttemptStatistics) -> RunResult:
        """Make an attempt in this event loop."""
        history = RunHistory(self._model, run.sampling(self._sampling), seed, run.record_key, self._policies)
        return await make_attempt(
            self._workflow,
            run.task,
            self._clients,
            history,
            self._auxiliary_models,
            self._truncated_reward,
            statistics,
        )


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Sends the task's prompt, after an optional system prompt; the answer is the run's output."""

    system_prompt: str | None = None

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The conversation that the answer continues."""
        return [*task.system_messages(self.system_prompt), {"role": "user", "content": task.prompt}]


@dataclass(frozen=True, slots=True)
class HowToRun:
    """How the tasks of a taskset are run."""

    workflow: Workflow
    sampling: SamplingParams


Progress = Callable[[int, int], None]  # called with the number of runs done and the number of all runs

_DEFAULT_LIMITS = RolloutLimits()


def run_rollouts(
    engine: PolicyEngine,
    tasks: Sequence[Task],
    workflow: Workflow | Mapping[str, HowToRun],
    *,
    round: int,
    batch: int,
    repeat_times: int,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    limits: RolloutLimits = _DEFAULT_LIMITS,
    auxiliary_models: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
    policies: Mapping[str, PolicyEngine] | None = None,
    greedy_first: bool = False,
    in_flight: InFlight | None = None,
) -> RolloutBatch:
    """Run ``workflow`` ``repeat_times`` times on every task.

    Rows are in task order; ids and seeds depend on the arguments alone.

    Args:
        workflow: one for all tasks, or, by the names of tasksets, a workflow and sampling parameters for each.
        sampling: sampling parameters for fields that a call does not set; the runner sets ``n`` and ``seed``. None if
            ``workflow`` has the sampling parameters of each taskset.
        policies: engines of further trainable policies, by the names that calls give as their model. A call with any
            other name goes to the policy of ``engine``.
        greedy_first: decode the first run of every task greedily.
        in_flight: end the batch early; only if every task is run by one single-turn workflow.

    Raises:
        EngineError: the engine died, or caused the failure of every run.
        UserCodeError: every run failed; the last error is chained.
    """
    started, cpu = perf_counter(), process_time()
    if isinstance(engine, EnginePool):
        engine.know_weights()
    status = engine.status()
    explored = ExploreBatch(round, batch, tasks, repeat_times, seed, greedy_first=greedy_first)
    if isinstance(workflow, Mapping):
        parts = [(workflow[name], part) for name, part in explored.parts().items()]
    else:
        assert sampling is not None, "a workflow for all tasks needs sampling parameters"
        parts = [(HowToRun(workflow, sampling), explored)]
    running = _Running(engine, status, explored, limits, auxiliary_models, FurtherPolicies.of(policies), in_flight)
    rows, tally = running.run(parts, on_progress)
    if tasks and not rows:
        raise _all_failed(explored, tally)
    kept = groups_to_train(rows, repeat_times, limits.group_policy)
    left = {row.group_id for row in running.unfinished}
    report = RolloutReport(
        seconds=perf_counter() - started,
        cpu_s=process_time() - cpu,
        engine_cpu_s=engine.status().cpu_seconds - status.cpu_seconds,
        **tally.counts(),
        **row_counts(kept),
        **_run_counts([run for run in explored.runs() if run.group_id not in left], repeat_times, rows, kept, tally),
        unfinished_groups=len(left),
    )
    return RolloutBatch(kept, report, tally.last_error, running.unfinished)


def groups_to_train(rows: Sequence[RolloutRow], repeat_times: int, policy: GroupPolicy) -> list[RolloutRow]:
    """Return the rows of groups that have enough runs for ``policy``. The rows of a group must be adjacent."""
    groups = (list(group) for _, group in groupby(rows, key=attrgetter("group_id")))
    return [row for g in groups if may_train(len({row.run_id for row in g}), repeat_times, policy) for row in g]


def _run_counts(
    requested: Sequence[Run], repeat_times: int, rows: Sequence[RolloutRow], kept: Sequence[RolloutRow], tally: Tally
) -> dict[str, Any]:
    """Return the report fields about the ``requested`` runs, and about groups that lack runs."""
    runs = Counter(row.group_id for row in {row.run_id: row for row in kept}.values())
    lost = {run.group_id for run in requested} - runs.keys()
    stopped_runs = set(tally.stopped_runs)
    stopped = len(lost & {run.group_id for run in requested if run.run_id in stopped_runs}) if lost else 0
    reasons = {"stopped": stopped, "failed": len(lost) - stopped}
    return {
        "runs": len(requested),
        "failed": len(requested) - len({row.run_id for row in rows}) - len(stopped_runs),
        "dropped_groups": len(lost),
        "partial_groups": sum(count < repeat_times for count in runs.values()),
        "dropped_for": {reason: count for reason, count in reasons.items() if count},
    }


@dataclass(slots=True)
class _Running:
    """Runs the parts of an explore batch."""

    engine: PolicyEngine
    status: EngineStatus
    batch: ExploreBatch
    limits: RolloutLimits
    auxiliary_models: Mapping[str, Any] | None
    further: FurtherPolicies
    in_flight: InFlight | None = None
    tally: Tally = field(default_factory=Tally)
    unfinished: list[RolloutRow] = field(default_factory=list)  # what the next batch continues

    def run(
        self, parts: Sequence[tuple[HowToRun, ExploreBatch]], on_progress: Progress | None
    ) -> tuple[list[RolloutRow], Tally]:
        """Return the rows of all runs that succeeded, in run order, and the failures of the others.

        The single-turn parts run first, one engine call for each. The runs of all other parts run side by side.
        """
        runs, done = self.batch.runs(), dict[str, list[RolloutRow]]()
        agents: dict[str, HowToRun] = {}
        for how, part in parts:
            if not isinstance(how.workflow, SingleTurnWorkflow):
                agents |= {run.run_id: how for run in part.runs()}
                continue
            for row in self._single_turn(how, part, how.workflow):
                done.setdefault(row.run_id, []).append(row)
        if on_progress is not None and self.in_flight is not None:
            on_progress(len(done), self.in_flight.enough * self.batch.repeat_times)
        elif on_progress is not None and len(agents) < len(runs):
            on_progress(len(runs) - len(agents), len(runs))
        if agents:
            done |= self._agents([run for run in runs if run.run_id in agents], agents, len(runs), on_progress)
        return [row for run in runs for row in done.get(run.run_id, [])], self.tally

    def _single_turn(self, how: HowToRun, part: ExploreBatch, workflow: SingleTurnWorkflow) -> list[RolloutRow]:
        limit = self.limits.max_prompt_tokens
        call = self.engine, self.status, workflow, part, how.sampling
        if self.in_flight is None:
            sampled, too_long = run_single_turn(*call, limit)
        else:
            sampled, self.unfinished, too_long = run_in_flight(*call, self.in_flight, limit)
        for run in too_long:
            reason = f"the prompt has more than {limit} tokens: shorten the prompts or raise model.max_prompt_tokens"
            self.tally.add_failure(run, 0, UserCodeError(reason))
        return _storable(sampled, part, self.tally)

    def _agents(
        self, runs: Sequence[Run], how_of: Mapping[str, HowToRun], total: int, on_progress: Progress | None
    ) -> dict[str, list[RolloutRow]]:
        """The rows of every agent run that succeeded, by run id. ``total`` is the number of all runs of the batch."""
        from rft_platform.rollout.runner.agent_runner import AgentRunner, ExecutorOfRun

        before = total - len(runs)
        executors = {id(how): self._executor(how) for how in how_of.values()}
        executor = ExecutorOfRun({run_id: executors[id(how)] for run_id, how in how_of.items()})
        runner = AgentRunner(self.engine, self.status, self.batch.seed, self.limits, self.further, self.tally)
        report = on_progress and (lambda done, _: on_progress(before + done, total))
        return runner.execute(runs, executor, report)

    def _executor(self, how: HowToRun) -> Any:
        from rft_platform.rollout.workers.worker_executor import WorkerExecutor

        kind: Any = WorkerExecutor if isinstance(how.workflow, WorkerWorkflow) else InProcessExecutor
        return kind(
            self.engine, self.status, how.workflow, how.sampling, self.limits, self.auxiliary_models, self.further
        )


def _storable(rows: list[RolloutRow], batch: ExploreBatch, tally: Tally) -> list[RolloutRow]:
    """Remove rows that the store would refuse, and count their runs (of one call each) as failed."""
    from rft_platform.experience.schema import check_storable  # imports pyarrow

    try:
        check_storable(rows)
    except ValueError as error:
        if len(rows) > 1:
            return [row for each in rows for row in _storable([each], batch, tally)]
        run = next(run for run in batch.runs() if run.run_id == rows[0].run_id)
        tally.add_failure(run, 0, error)
        return []
    return rows


def nothing_whole(
    where: str, report: RolloutReport, policy: GroupPolicy, repeat_times: int, last_error: BaseException | None
) -> RftError:
    """Return the error for an exploration in which some runs succeeded, but no group may train.

    The result is an EngineError, which is retried, if the engine caused the last error; otherwise it is an error of the
    user's code or settings.
    """
    errors = sorted(report.errors.items(), key=lambda item: -item[1])[:NAMED]
    errors_text = "; ".join(f"{count} x {error}" for error, count in errors) or "no error was reported"
    needed = "a whole group of" if policy != "partial" else "any of"
    what = (
        f"{where}: no task has {needed} {repeat_times} runs (algorithm.repeat_times): all {report.dropped_groups} "
        f"groups were dropped (explorer.group_policy {policy}) for {report.failed} failed and {report.stopped} stopped "
        f"runs of {report.runs}. Failed attempts: {errors_text}"
    )
    if isinstance(last_error, EngineError) or (last_error is None and not report.stopped):
        return EngineError(what)
    failure = UserCodeError(
        f"{what}. Fix what fails, or let groups train that are not whole (explorer.group_policy: partial), or request "
        "fewer runs per task"
    )
    failure.__cause__ = last_error
    return failure


def _hint(error: BaseException) -> str:
    """What to do about the error of an attempt; the platform's own errors say it themselves."""
    text = error_text(error)
    if isinstance(error, TimeoutError) or "TimeoutError" in text:
        return "; make the workflow faster, or give an attempt more time: explorer.max_timeout"
    return "" if text.startswith((UserError.__name__, UserCodeError.__name__)) else "; correct the workflow"


def _all_failed(batch: ExploreBatch, tally: Tally) -> RftError:
    error = tally.last_error
    runs = len(batch.tasks) * batch.repeat_times
    failed = f"all {runs} runs failed" if runs > 1 else "the only run failed"
    what = f"{round_key(batch.round)}, batch {batch.number}: {failed}"
    if error is None or isinstance(error, EngineError):
        return EngineError(f"{what}: {error or 'the engine aborted every answer'}")
    last = ", the last" if runs > 1 else ""
    failure = UserCodeError(f"{what}{last} with {error_text(error)}{user_location(error)}{_hint(error)}")
    failure.__cause__ = error
    return failure
