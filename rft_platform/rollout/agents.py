"""Runs of a workflow that talks to the model itself: many at once, each on its own, each retried on its own."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rft_platform.experience.record import RolloutRow
from rft_platform.inference.interface import EngineStatus, PolicyEngine, SamplingParams
from rft_platform.inference.pool import EnginePool
from rft_platform.rollout.chat_models import framework_model
from rft_platform.rollout.history import RunHistory
from rft_platform.rollout.model_handle import ModelHandle
from rft_platform.rollout.recording import RecordingClients
from rft_platform.rollout.report import Tally
from rft_platform.rollout.run import AgentLimits, Run, rows_of_run
from rft_platform.rollout.workflow import AgentWorkflow, WorkflowFunction
from rft_platform.signature import accepted_arguments

LOGGER = logging.getLogger("rft_platform.rollout")

_SPARE_THREADS = 4
_ERROR_CHARACTERS = 200


class _Threads(ThreadPoolExecutor):
    """Where agents that block run. As many as runs, not as processors: they wait for the model.

    The event loop ends without waiting for them: a thread cannot be stopped, so one whose run timed out may still be
    busy, and would hold up the batch for as long as it likes.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


class AgentRunner:
    """Executes the agent runs of one explore batch. One bad run harms no other; a dead engine ends the batch."""

    def __init__(
        self,
        engine: PolicyEngine,
        status: EngineStatus,
        workflow: WorkflowFunction | AgentWorkflow,
        sampling: SamplingParams,
        seed: int,
        limits: AgentLimits,
        auxiliary_models: Mapping[str, Any] | None = None,
    ) -> None:
        self.tally = Tally()
        self._engine = engine
        self._status = status
        self._workflow = workflow
        self._sampling = sampling
        self._seed = seed
        self._limits = limits
        self._auxiliary_models = auxiliary_models

    def execute(
        self, runs: Sequence[Run], on_progress: Callable[[int, int], None] | None = None
    ) -> dict[str, list[RolloutRow]]:
        """Rows of every run that succeeded, by run id. Raises EngineError when the engine has died.

        ``on_progress`` is told how many runs have succeeded, of how many.
        """
        return asyncio.run(self._execute(runs, on_progress))

    async def _execute(
        self, runs: Sequence[Run], on_progress: Callable[[int, int], None] | None
    ) -> dict[str, list[RolloutRow]]:
        limits = self._limits
        asyncio.get_running_loop().set_default_executor(_Threads(limits.concurrency + _SPARE_THREADS, "rollout"))
        replicas = self._engine.replicas if isinstance(self._engine, EnginePool) else None
        clients = RecordingClients(self._engine.base_url, limits.timeout_s, replicas)
        slots = asyncio.Semaphore(limits.concurrency)
        done: dict[str, list[RolloutRow]] = {}

        async def one(run: Run, first_attempt: int) -> None:
            async with slots:
                rows = await self._run(run, clients, first_attempt)
            if rows is not None:
                done[run.run_id] = rows
                if on_progress is not None:
                    on_progress(len(done), len(runs))

        try:
            for number in range(limits.passes):
                if number and not done:
                    break  # nothing works: trying everything again is a waste
                async with asyncio.TaskGroup() as group:
                    for run in runs:
                        if run.run_id not in done:
                            group.create_task(one(run, number * (limits.max_retries + 1)))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return done

    async def _run(self, run: Run, clients: RecordingClients, first_attempt: int) -> list[RolloutRow] | None:
        """Rows of a run, or ``None`` when all its attempts failed."""
        for attempt in range(first_attempt, first_attempt + self._limits.max_retries + 1):
            self.tally.retried += attempt > 0
            rows = await self._attempt(run, clients, attempt)
            if rows is not None:
                return rows
        return None

    async def _attempt(self, run: Run, clients: RecordingClients, attempt: int) -> list[RolloutRow] | None:
        history = RunHistory(self._status.model_path, self._sampling, run.seed(self._seed, attempt))
        model = ModelHandle(clients, history)
        try:
            async with asyncio.timeout(self._limits.timeout_s) as deadline:
                returned = await self._call(run, model)
            return rows_of_run(run, returned, history.calls(), self._status, attempt)
        except (Exception, SystemExit) as error:  # an agent that exits must not take the other runs along
            late = TimeoutError(f"no result within {self._limits.timeout_s:g} s")
            self._note(run, attempt, late if deadline.expired() else error)
        finally:
            history.close()
            await model.aclose()
            self.tally.client_retries += history.client_retries
        if history.connection_lost:
            await asyncio.to_thread(self._engine.status)  # raises EngineError when the engine itself is gone
        return None

    async def _call(self, run: Run, model: ModelHandle) -> Any:
        workflow = self._workflow
        if isinstance(workflow, AgentWorkflow):
            return await workflow.run(run.task, model, self._auxiliary_models)
        offered = {
            "task": copy.deepcopy(run.task.raw),  # a run may change its task without another one seeing it
            "model": framework_model(model),
            "auxiliary_models": self._auxiliary_models,
            "logger": LOGGER,
        }
        arguments = accepted_arguments(workflow, offered)
        if inspect.iscoroutinefunction(workflow):
            return await workflow(**arguments)
        returned = await asyncio.to_thread(workflow, **arguments)
        return await returned if inspect.isawaitable(returned) else returned

    def _note(self, run: Run, attempt: int, error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        level = logging.DEBUG if message in self.tally.errors else logging.WARNING  # a kind of failure is told once
        self.tally.errors[message] += 1
        self.tally.last_error = error
        LOGGER.log(level, "run %s, attempt %d failed: %s", run.run_id, attempt, message)
