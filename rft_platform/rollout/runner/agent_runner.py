"""Execute agent runs concurrently, with retries, time-outs and straggler handling for each run.

Stragglers are handled by dynamic time-outs and by over-rollout (finish a batch without its slowest runs).
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rft_platform.common.threads import DaemonThreads, is_cancellation
from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.schema import check_storable
from rft_platform.inference.interface import EngineStatus, PolicyEngine
from rft_platform.rollout.recording.policy_routes import FurtherPolicies
from rft_platform.rollout.runner.report import Tally
from rft_platform.rollout.runs.attempt import AttemptStatistics, end_other_tasks, run_event_loop
from rft_platform.rollout.runs.run import Run, RunResult, rows_of_run

LOG = logging.getLogger(__name__)

#: A dynamic time-out begins after this many successful attempts: the mean of fewer durations says little.
ENOUGH_ATTEMPTS = 8
#: Minimum of a dynamic time-out: shorter durations depend on the machine's load rather than on the run.
SHORTEST_S = 1.0


@dataclass(slots=True, eq=False)
class _Running:
    """A running attempt: its start on the event loop's clock, and its time-out."""

    started: float
    deadline: asyncio.Timeout


class Deadlines:
    """The time-outs of all running attempts. They are rescheduled when the mean duration changes."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._timeout_s, self._ratio = limits.timeout_s, limits.patience.dynamic_ratio
        self._running: set[_Running] = set()
        self._ended, self._seconds = 0, 0.0

    @property
    def limit_s(self) -> float:
        """Current time limit of an attempt, in seconds."""
        if self._ratio is None or self._ended < ENOUGH_ATTEMPTS:
            return self._timeout_s
        return min(self._timeout_s, max(SHORTEST_S, self._ratio * self._seconds / self._ended))

    def timeout_error(self, cause: BaseException) -> TimeoutError:
        """Error for an attempt that took too long. All such errors have the same text and count as one kind."""
        limit = f"{self._timeout_s:g} s"
        if self.limit_s != self._timeout_s:
            limit = f"{self._ratio:g} times the mean duration of an attempt (dynamic_timeout)"
        error = TimeoutError(f"no result within {limit}")
        error.__cause__ = cause  # its traceback shows where the workflow waited
        return error

    @contextmanager
    def attempt(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Keep ``deadline``, which the caller has entered, up to date while the body runs."""
        now = asyncio.get_running_loop().time
        running = _Running(now(), deadline)
        self._running.add(running)
        try:
            self._reschedule(running)
            yield
        finally:
            self._running.discard(running)

    def succeeded(self, seconds: float) -> None:
        """Count a successful attempt in the mean, and move the time-outs of the running ones."""
        self._ended, self._seconds = self._ended + 1, self._seconds + seconds
        if self._ratio is not None and self._ended >= ENOUGH_ATTEMPTS:
            for running in self._running:
                self._reschedule(running)

    def _reschedule(self, running: _Running) -> None:
        if not running.deadline.expired():
            running.deadline.reschedule(running.started + self.limit_s)


class TaskQuorum:
    """Counts tasks whose runs have all succeeded, and says when the batch may finish without the other tasks."""

    def __init__(self, runs: Sequence[Run], limits: RolloutLimits) -> None:
        self._missing = Counter(run.group_id for run in runs)
        self._complete = 0
        tasks = len(self._missing)
        over = limits.patience.over_ratio
        self._needed = max(1, math.ceil(tasks * (1.0 - over) - 1e-9)) if over > 0 else math.inf

    def add(self, run: Run) -> bool:
        """Count a successful run; return True if this run makes the number of complete tasks sufficient."""
        self._missing[run.group_id] -= 1
        if self._missing[run.group_id]:
            return False
        self._complete += 1
        return self._complete == self._needed


class Slot(Protocol):
    """A slot that makes one attempt at a time."""

    async def attempt(self, run: Run, seed: int, statistics: AttemptStatistics) -> RunResult:
        """Make an attempt; raises what the workflow raises. If cancelled, end all code that could call the model."""
        ...


class Executor(Protocol):
    """Provides the slots in which attempts are made: in this process or in worker processes."""

    def slot(self) -> AbstractAsyncContextManager[Slot]:
        """Wait for a free slot and hold it while the context lasts. An error raised here ends the batch."""
        ...


class ExecutorOfRun:
    """The executors of the runs of a batch, by run id: runs with one workflow share an executor."""

    def __init__(self, executors: Mapping[str, AbstractAsyncContextManager[Executor]]) -> None:
        self._executors = executors
        self._entered: dict[int, Executor] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "ExecutorOfRun":
        async with AsyncExitStack() as stack:  # leaves what was entered if a later executor fails
            for executor in {id(executor): executor for executor in self._executors.values()}.values():
                self._entered[id(executor)] = await stack.enter_async_context(executor)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._stack.__aexit__(*failure)

    def slot(self, run: Run) -> AbstractAsyncContextManager[Slot]:
        """A slot of the executor of ``run``."""
        return self._entered[id(self._executors[run.run_id])].slot()


class AgentRunner:
    """Executes the agent runs of one explore batch. A failed run affects no other run; a dead engine ends the batch."""

    def __init__(
        self,
        engine: PolicyEngine,
        status: EngineStatus,
        seed: int,
        limits: RolloutLimits,
        further: FurtherPolicies,
        tally: Tally,
    ) -> None:
        self.tally = tally
        self._engine = engine
        self._status = status
        self._further = further
        self._seed = seed
        self._limits = limits
        self._deadlines = Deadlines(limits)
        self._given_up: set[str] = set()

    def execute(
        self,
        runs: Sequence[Run],
        executor: ExecutorOfRun,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, list[RolloutRow]]:
        """Return the rows of every run that succeeded, by run id. Raises EngineError if the engine has died.

        ``executor`` is entered in a new event loop. ``on_progress`` is called with the number of runs that have
        succeeded and the number of all runs.
        """
        return run_event_loop(self._execute(runs, executor, on_progress))

    async def _execute(
        self,
        runs: Sequence[Run],
        executor: ExecutorOfRun,
        on_progress: Callable[[int, int], None] | None,
    ) -> dict[str, list[RolloutRow]]:
        asyncio.get_running_loop().set_default_executor(DaemonThreads("rollout"))
        done: dict[str, list[RolloutRow]] = {}
        try:
            async with executor as entered, asyncio.timeout(None) as grace:
                await self._passes(runs, entered, grace, done, on_progress)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        except TimeoutError:
            if not grace.expired():
                raise
            ended = done.keys() | self._given_up
            self.tally.stopped_runs = [run.run_id for run in runs if run.run_id not in ended]
            LOG.info("%d straggling runs were stopped: enough tasks are done", len(self.tally.stopped_runs))
        finally:
            await end_other_tasks()
        return done

    async def _passes(
        self,
        runs: Sequence[Run],
        executor: ExecutorOfRun,
        grace: asyncio.Timeout,
        done: dict[str, list[RolloutRow]],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        limits, concurrent, quorum = (
            self._limits,
            asyncio.Semaphore(self._limits.concurrency),
            TaskQuorum(runs, self._limits),
        )

        async def run_once(run: Run, first_attempt: int) -> None:
            """Run one agent run with its retries, and count it as done or as given up."""
            async with concurrent:
                rows = await self._run(run, executor, first_attempt)
            if rows is None:
                self._given_up.add(run.run_id)
                return
            done[run.run_id] = rows
            if quorum.add(run):
                grace.reschedule(asyncio.get_running_loop().time() + limits.patience.wait_after_min_s)
            if on_progress is not None:
                on_progress(len(done), len(runs))

        for number in range(limits.passes):
            if number and not done:
                break  # no run has succeeded: another pass is very likely to fail too
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    if run.run_id not in done:
                        group.create_task(run_once(run, number * (limits.max_retries + 1)))

    async def _run(self, run: Run, executor: ExecutorOfRun, first_attempt: int) -> list[RolloutRow] | None:
        """Return the rows of a run, or ``None`` if all its attempts failed.

        An attempt that was lost with its machine says nothing about the run: the next one has its seed, so the rows are
        those of an undisturbed run.
        """
        seeded = first_attempt
        for attempt in range(first_attempt, first_attempt + self._limits.max_retries + 1):
            self.tally.retried += attempt > 0
            statistics = AttemptStatistics()
            async with executor.slot(run) as slot:
                rows = await self._attempt(run, slot, attempt, run.seed(self._seed, seeded), statistics)
            if rows is not None:
                return rows
            seeded += not statistics.machine_lost
        return None

    async def _attempt(
        self, run: Run, slot: Slot, attempt: int, seed: int, statistics: AttemptStatistics
    ) -> list[RolloutRow] | None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(None) as deadline:
                with self._deadlines.attempt(deadline):
                    result = await slot.attempt(run, seed, statistics)
            self._deadlines.succeeded(clock() - began)
            rows = rows_of_run(run, result, self._status, attempt, self._further.statuses)
            check_storable(rows)
            return rows
        except BaseException as error:  # whatever an agent raises, it must not end the other runs
            if is_cancellation(error):
                raise
            self.tally.add_failure(run, attempt, self._deadlines.timeout_error(error) if deadline.expired() else error)
        finally:
            self.tally.client_retries += statistics.client_retries
        if statistics.connection_lost:
            await asyncio.to_thread(self._engine.status)  # raises EngineError when the engine itself is gone
            await asyncio.to_thread(self._further.check)
        return None
