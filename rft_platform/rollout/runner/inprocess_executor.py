"""Make attempts in this process: async workflows share the event loop, others have a thread each."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.inference.interface import EngineStatus, PolicyEngine, SamplingParams
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.rollout.recording.clients import RecordingClients  # imports openai
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.policy_routes import NONE, FurtherPolicies
from rft_platform.rollout.runs.attempt import Connection, make_attempt
from rft_platform.rollout.runs.run import Run, RunResult
from rft_platform.rollout.workflow import LocalWorkflow


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
        further: FurtherPolicies = NONE,
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

    async def attempt(self, run: Run, seed: int, connection: Connection) -> RunResult:
        """Make an attempt in this event loop."""
        history = RunHistory(self._model, run.sampling(self._sampling), seed, run.record_key, self._policies)
        return await make_attempt(
            self._workflow,
            run.task,
            self._clients,
            history,
            self._auxiliary_models,
            self._truncated_reward,
            connection,
        )
