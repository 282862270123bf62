"""Attempts in this process: async workflows share the event loop, others have a thread each."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from rft_platform.config.limits import RolloutLimits
from rft_platform.errors import NAMED
from rft_platform.inference.interface import EngineStatus, PolicyEngine, SamplingParams
from rft_platform.inference.pool import EnginePool
from rft_platform.rollout.attempt import Connection, make_attempt
from rft_platform.rollout.calling import LOGGER
from rft_platform.rollout.history import RunHistory
from rft_platform.rollout.policies import NONE, FurtherPolicies
from rft_platform.rollout.recording import RecordingClients  # imports openai
from rft_platform.rollout.run import Run, RunResult
from rft_platform.rollout.workflow import LocalWorkflow

_ATTEMPT: ContextVar[int | None] = ContextVar("rft_attempt", default=None)  # id of the process that makes the attempt
_RUNNING: set[str] = set()  # run ids of the attempts under way
_exit_process = os._exit


class InProcess:
    """Makes attempts where it is, as many at once as are asked of it."""

    def __init__(
        self,
        engine: PolicyEngine,
        status: EngineStatus,
        workflow: LocalWorkflow,
        sampling: SamplingParams,
        limits: RolloutLimits,
        auxiliary_models: Mapping[str, Any] | None,
        further: FurtherPolicies = NONE,
    ) -> None:
        replicas = engine.replicas if isinstance(engine, EnginePool) else None
        self._clients = RecordingClients(engine.base_url, limits.timeout_s, replicas, engine.api_key)
        self._model = status.model_path
        self._workflow = workflow
        self._sampling = sampling
        self._truncated_reward = limits.truncated_reward
        self._auxiliary_models = auxiliary_models
        self._policies = further.roads

    async def __aenter__(self) -> "InProcess":
        os._exit = _exit_of_workflow
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._clients.close()

    @asynccontextmanager
    async def place(self) -> AsyncIterator["InProcess"]:
        """There is always room."""
        yield self

    async def attempt(self, run: Run, seed: int, connection: Connection) -> RunResult:
        """Make an attempt in this event loop."""
        history = RunHistory(self._model, self._sampling, seed, run.record_key, self._policies)
        _ATTEMPT.set(os.getpid())  # of the event loop's task that makes this attempt, and of what the workflow starts
        _RUNNING.add(run.run_id)
        try:
            return await make_attempt(
                self._workflow,
                run.task,
                self._clients,
                history,
                self._auxiliary_models,
                self._truncated_reward,
                connection,
            )
        finally:
            _RUNNING.discard(run.run_id)


def _exit_of_workflow(status: int) -> NoReturn:
    """``os._exit``, which in a workflow fails its run: it would end this process, and the phase, without a message.

    A child that a workflow has forked ends. So does this process where a thread that is no attempt's calls it, but the
    log names the runs under way.
    """
    owner = _ATTEMPT.get()
    if owner == os.getpid():
        raise SystemExit(f"the workflow called os._exit({status}), which would end the whole phase: return or raise")
    if owner is None and _RUNNING:
        named = ", ".join(sorted(_RUNNING)[:NAMED])
        LOGGER.error(
            "user code ends this process with os._exit(%s) while runs are under way (%s%s): the phase ends here. With "
            "explorer.workers.kind: process it would cost one run",
            status,
            named,
            ", ..." if len(_RUNNING) > NAMED else "",
        )
    _exit_process(status)
