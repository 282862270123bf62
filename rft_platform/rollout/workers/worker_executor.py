"""Make attempts in worker processes, where a crash or hang of user code affects only that run."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rft_platform.cluster.child import Child, ChildError, MachineLostError
from rft_platform.cluster.interface import Bundle, Worker
from rft_platform.cluster.worker_pool import WorkerKind, WorkerPool
from rft_platform.common.errors import EngineError, UserError
from rft_platform.common.user_code import user_folders
from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.inference.interface import EngineStatus, PolicyEngine, SamplingParams
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.inference.pool.replicas import Replica, Replicas
from rft_platform.rollout.recording.policy_routes import FurtherPolicies
from rft_platform.rollout.runs.attempt import AttemptStatistics, RemoteFailure
from rft_platform.rollout.runs.run import Run, RunResult
from rft_platform.rollout.workers.worker_wire import json_text, result_from_json, task_to_json, workflow_to_json
from rft_platform.rollout.workflow import WorkerWorkflow
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel

LOG_NAME = "rollout-workers.log"
_MODULE = "rft_platform.rollout.workers.worker"


class WorkerExecutor:
    """Up to ``count`` worker processes, started on demand. None is left running when the context ends."""

    def __init__(
        self,
        engine: PolicyEngine,
        status: EngineStatus,
        workflow: WorkerWorkflow,
        sampling: SamplingParams,
        limits: RolloutLimits,
        auxiliary_models: Mapping[str, Any] | None,
        further: FurtherPolicies,
    ) -> None:
        """Raises UserError for auxiliary models or arguments that cannot be sent to another process."""
        self.replicas = engine.replicas if isinstance(engine, EnginePool) else None
        self.tokens = sampling.max_tokens
        setup = {
            "workflow": workflow_to_json(workflow),
            "sys_path": user_folders(),
            "auxiliary_models": _specs(auxiliary_models),
            "policies": {name: asdict(route) for name, route in further.routes.items()},
            "base_url": engine.base_url,
            "api_key": engine.api_key,
            "replicated": self.replicas is not None,
            "timeout_s": limits.timeout_s,
            "model": status.model_path,
            "truncated_reward": limits.truncated_reward,
            "sampling": asdict(sampling),
        }
        kind = WorkerKind(
            workflow.name,
            _MODULE,
            json_text(setup, f"workflow_args of workflow {workflow.name!r}"),
            starter(workflow),
            LOG_NAME,
            workflow.python,
            workflow.log_folder,
            workflow.environment_s,
        )
        self._pool = WorkerPool(kind, min(workflow.count or limits.concurrency, limits.concurrency))

    async def __aenter__(self) -> "WorkerExecutor":
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._pool.__aexit__(*failure)

    @property
    def log(self) -> Path:
        """The log file of the workers' output."""
        return self._pool.log

    @asynccontextmanager
    async def slot(self) -> AsyncIterator["WorkerSlot"]:
        """Yield a worker that is ready; kill it afterwards if it did not finish its attempt."""
        async with self._pool.lent() as lent:
            slot = WorkerSlot(self, lent.worker)
            yield slot
            lent.reusable = slot.reusable


class WorkerSlot:
    """A worker for one attempt."""

    def __init__(self, executor: WorkerExecutor, worker: Worker) -> None:
        self.reusable = True  # False during an attempt, and after an attempt whose tasks could not be stopped
        self._executor = executor
        self._worker = worker

    async def attempt(self, run: Run, seed: int, statistics: AttemptStatistics) -> RunResult:
        """Make an attempt in the worker. If cancelled, the worker is killed when the slot is released."""
        replicas, preferred = self._executor.replicas, None
        if replicas is not None:
            try:
                preferred = replicas.take(self._executor.tokens)
            except EngineError:
                statistics.connection_lost = True
                raise
        try:
            request = {
                "task": task_to_json(run.task),
                "seed": seed,
                "key": run.record_key,
                "greedy": run.greedy,
                "replicas": _addresses(replicas, preferred),
            }
            text = json_text(request, f"task {run.task.task_id}")
            self.reusable = False
            answer = await self._worker.ask_async("attempt", text, on_note=self._mark_down)
            self.reusable = not answer["tasks_left"]
            return self._result(answer, statistics)
        except ChildError as error:
            statistics.machine_lost = isinstance(error, MachineLostError)
            raise RemoteFailure(f"WorkerDied: the worker process {error.how} during the run") from None
        finally:
            if replicas is not None and preferred is not None:
                replicas.release(preferred, self._executor.tokens)

    def _result(self, message: dict[str, Any], statistics: AttemptStatistics) -> RunResult:
        statistics.client_retries, statistics.connection_lost = message["client_retries"], message["connection_lost"]
        failed = message.get("failed")
        if failed is None:
            return result_from_json(message["result"])
        if failed["engine"]:
            raise EngineError(failed["error"].partition(": ")[2])
        raise RemoteFailure(failed["error"], failed["location"])

    def _mark_down(self, down: tuple[int, str, str]) -> None:
        """Mark a replica that the worker could not reach as down: its number, its address and why."""
        replicas, (number, url, why) = self._executor.replicas, down
        for replica in replicas.serving() if replicas is not None else []:
            if (replica.number, replica.url) == (number, url):
                replicas.mark_down(replica, why)  # type: ignore[union-attr]


def starter(workflow: WorkerWorkflow) -> Callable[..., Worker]:
    """What starts a worker process: this machine, or the workflow's cluster."""
    if workflow.cluster is None:
        return Child
    bundle = Bundle(workflow.cpus, resources=workflow.resources)
    return partial(workflow.cluster.worker, bundle=bundle, runtime_env=workflow.runtime_env)


def _specs(auxiliary_models: Mapping[str, Any] | None) -> dict[str, Any]:
    specs = {}
    for name, model in (auxiliary_models or {}).items():
        if not isinstance(model, AuxiliaryModel):
            raise UserError(
                f"auxiliary model {name!r} is {type(model).__name__}: worker processes can "
                "only use models of explorer.auxiliary_models, which have an address"
            )
        specs[name] = asdict(model.spec)
    return specs


def _addresses(replicas: Replicas | None, preferred: Replica | None) -> list[tuple[int, str, str]]:
    """Addresses of the serving replicas, ``preferred`` first."""
    if replicas is None:
        return []
    serving = sorted(replicas.serving(), key=lambda replica: replica is not preferred)
    return [(replica.number, replica.url, replica.api_key) for replica in serving]
