"""Make attempts in worker processes, where a crash or hang of user code affects only that run."""

import asyncio
import site
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rft_platform.common.errors import EngineError, UserError
from rft_platform.common.files import last_lines
from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.inference.interface import EngineStatus, PolicyEngine, SamplingParams
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.inference.pool.replicas import Replica, Replicas
from rft_platform.rollout.recording.policy_routes import NONE, FurtherPolicies
from rft_platform.rollout.runs.attempt import Connection, RemoteFailure
from rft_platform.rollout.runs.run import Run, RunResult
from rft_platform.rollout.workers.worker_process import WorkerProcess, worker_environment
from rft_platform.rollout.workers.worker_wire import message_line, result_from_json, task_to_json, workflow_to_json
from rft_platform.rollout.workflow import WorkerWorkflow
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel

LOG_NAME = "rollout-workers.log"
_START_S = 300.0  # time limit for the start, which imports the workflow and its packages
_LOG_LINES = 12


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
        further: FurtherPolicies = NONE,
    ) -> None:
        """Raises UserError for auxiliary models or arguments that cannot be sent to another process."""
        self.replicas = engine.replicas if isinstance(engine, EnginePool) else None
        self.tokens = sampling.max_tokens
        self._python = workflow.python
        self._log_folder = workflow.log_folder
        self._name = workflow.name
        self._slots = asyncio.Semaphore(min(workflow.count or limits.concurrency, limits.concurrency))
        self._workers: set[WorkerProcess] = set()
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
        self._setup = message_line({"setup": setup}, f"workflow_args of workflow {workflow.name!r}")

    async def __aenter__(self) -> "WorkerExecutor":
        self._folder = tempfile.TemporaryDirectory(prefix="rft-workers-", ignore_cleanup_errors=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *failure: object) -> None:
        for worker in self._workers:
            worker.kill()
        await asyncio.sleep(0)  # let the transports close
        self._folder.cleanup()

    @property
    def log(self) -> Path:
        """The log file of the workers' output."""
        return (self._log_folder or Path(self._folder.name)) / LOG_NAME

    @asynccontextmanager
    async def slot(self) -> AsyncIterator["WorkerSlot"]:
        """Yield a worker that is ready; kill it afterwards if it did not finish its attempt."""
        async with self._slots:
            worker = next((worker for worker in self._workers if worker.idle), None) or await self._start()
            try:
                worker.idle = False
                slot = WorkerSlot(self, worker)
                yield slot
                worker.idle = slot.reusable
            finally:
                if not worker.idle:
                    self._drop(worker)

    async def _start(self) -> WorkerProcess:
        python = self._python or sys.executable
        env = worker_environment(self._python, Path(self._folder.name))
        try:
            worker = WorkerProcess(python, self.log, env)
        except OSError as error:
            raise UserError(f"explorer.workers.python {python}: cannot be run ({error})") from error
        self._workers.add(worker)
        try:
            async with asyncio.timeout(_START_S):
                answer = await worker.ask(self._setup)
            if answer is None:
                raise UserError(
                    f"a worker process under {python} {await worker.how_it_ended()} at its start.{self._tail()}"
                )
            if "refused" in answer:
                raise UserError(f"a worker process under {python} cannot run {self._name!r}: {answer['refused']}")
        except TimeoutError:
            self._drop(worker)
            raise UserError(
                f"a worker process under {python} was not ready after {_START_S:.0f} s.{self._tail()}"
            ) from None
        except BaseException:
            self._drop(worker)
            raise
        return worker

    def _drop(self, worker: WorkerProcess) -> None:
        self._workers.discard(worker)
        worker.kill()

    def _tail(self) -> str:
        lines = last_lines(self.log, _LOG_LINES)
        return f" It printed:\n{lines}" if lines else ""


class WorkerSlot:
    """A worker for one attempt."""

    def __init__(self, pool: WorkerExecutor, worker: WorkerProcess) -> None:
        self.reusable = True  # False during an attempt, and after an attempt whose tasks could not be stopped
        self._pool = pool
        self._worker = worker

    async def attempt(self, run: Run, seed: int, connection: Connection) -> RunResult:
        """Make an attempt in the worker. If cancelled, the worker is killed when the slot is released."""
        replicas, home = self._pool.replicas, None
        if replicas is not None:
            try:
                home = replicas.take(self._pool.tokens)
            except EngineError:
                connection.lost = True
                raise
        try:
            request = {
                "task": task_to_json(run.task),
                "seed": seed,
                "key": run.record_key,
                "greedy": run.greedy,
                "replicas": _addresses(replicas, home),
            }
            message = message_line({"attempt": request}, f"task {run.task.task_id}")
            self.reusable = False
            await self._worker.send(message)
            return self._result(await self._answer(), connection)
        finally:
            if replicas is not None and home is not None:
                replicas.release(home, self._pool.tokens)

    async def _answer(self) -> dict[str, Any]:
        while (message := await self._worker.receive()) is not None:
            if "down" not in message:
                self.reusable = not message["tasks_left"]
                return message
            _mark_down(self._pool.replicas, *message["down"])
        raise RemoteFailure(f"WorkerDied: the worker process {await self._worker.how_it_ended()} during the run")

    def _result(self, message: dict[str, Any], connection: Connection) -> RunResult:
        connection.client_retries, connection.lost = message["client_retries"], message["connection_lost"]
        failed = message.get("failed")
        if failed is None:
            return result_from_json(message["result"])
        if failed["engine"]:
            raise EngineError(failed["error"].partition(": ")[2])
        raise RemoteFailure(failed["error"], failed["location"])


def user_folders() -> list[str]:
    """The folders of ``sys.path`` with the user's modules, without the folders of Python and of installed packages."""
    own = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *site.getsitepackages()}
    roots = [Path(folder).resolve() for folder in own]
    folders = dict.fromkeys(str(Path(folder or ".").resolve()) for folder in sys.path)
    return [folder for folder in folders if not any(Path(folder).is_relative_to(root) for root in roots)]


def _specs(auxiliary_models: Mapping[str, Any] | None) -> dict[str, Any]:
    specs = {}
    for name, model in (auxiliary_models or {}).items():
        if not isinstance(model, AuxiliaryModel):
            raise UserError(
                f"auxiliary model {name!r} is {type(model).__name__}: worker processes can "
                "only use models of explorer.auxiliary_models, which have an address"
            )
        specs[name] = model.spec.to_json()
    return specs


def _addresses(replicas: Replicas | None, home: Replica | None) -> list[tuple[int, str, str]]:
    """Addresses of the serving replicas, ``home`` first."""
    if replicas is None:
        return []
    serving = sorted(replicas.serving(), key=lambda replica: replica is not home)
    return [(replica.number, replica.url, replica.api_key) for replica in serving]


def _mark_down(replicas: Replicas | None, number: int, url: str, why: str) -> None:
    for replica in replicas.serving() if replicas is not None else []:
        if (replica.number, replica.url) == (number, url):
            replicas.mark_down(replica, why)  # type: ignore[union-attr]
