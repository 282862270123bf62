"""Make attempts in worker processes, where a crash or hang of user code affects only that run."""

import asyncio
import site
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rft_platform.cluster.child import AnswerTimeoutError, Child, ChildError, KilledError, MachineLostError
from rft_platform.cluster.interface import Bundle, Worker
from rft_platform.common.errors import EngineError, RftError, UserError
from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.inference.interface import EngineStatus, PolicyEngine, SamplingParams
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.inference.pool.replicas import Replica, Replicas
from rft_platform.rollout.recording.policy_routes import NONE, FurtherPolicies
from rft_platform.rollout.runs.attempt import Connection, RemoteFailure
from rft_platform.rollout.runs.run import Run, RunResult
from rft_platform.rollout.workers.worker_wire import json_text, result_from_json, task_to_json, workflow_to_json
from rft_platform.rollout.workflow import WorkerWorkflow
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel

LOG_NAME = "rollout-workers.log"
_START_S = 300.0  # time limit for the start, which imports the workflow and its packages
_LOST_STARTS = 20  # a cluster needs some seconds to notice that a node is gone
_KILLED_STARTS = 3  # by SIGKILL: one may be chance, several are the kernel's when memory runs out
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
        further: FurtherPolicies = NONE,
    ) -> None:
        """Raises UserError for auxiliary models or arguments that cannot be sent to another process."""
        self.replicas = engine.replicas if isinstance(engine, EnginePool) else None
        self.tokens = sampling.max_tokens
        self._python = workflow.python
        self._log_folder = workflow.log_folder
        self._name = workflow.name
        self._slots = asyncio.Semaphore(min(workflow.count or limits.concurrency, limits.concurrency))
        self._start_process = _starter(workflow)
        self._workers: set[Worker] = set()
        self._ready = 0  # workers that have loaded the workflow; some of them may have ended
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._starts: set[asyncio.Task[Worker]] = set()  # starts for which no slot waits
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
        self._setup = json_text(setup, f"workflow_args of workflow {workflow.name!r}")

    async def __aenter__(self) -> "WorkerExecutor":
        self._folder = tempfile.TemporaryDirectory(prefix="rft-workers-", ignore_cleanup_errors=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *failure: object) -> None:
        for start in self._starts:
            start.cancel()
        for worker in self._workers:
            worker.kill()
        self._folder.cleanup()

    @property
    def log(self) -> Path:
        """The log file of the workers' output."""
        return (self._log_folder or Path(self._folder.name)) / LOG_NAME

    @asynccontextmanager
    async def slot(self) -> AsyncIterator["WorkerSlot"]:
        """Yield a worker that is ready; kill it afterwards if it did not finish its attempt."""
        async with self._slots:
            while not (worker := await self._next()).is_alive:
                self._drop(worker)
            is_idle = False
            try:
                slot = WorkerSlot(self, worker)
                yield slot
                is_idle = slot.reusable
            finally:
                if is_idle:
                    self._idle.put_nowait(worker)
                else:
                    self._drop(worker)

    async def _next(self) -> Worker:
        """A worker that is idle, else the first that starts or becomes idle: no node may have room for another one."""
        with suppress(asyncio.QueueEmpty):
            return self._idle.get_nowait()
        start = self._starts.pop() if self._starts else asyncio.create_task(self._start())
        idle = asyncio.create_task(self._idle.get())
        try:
            await asyncio.wait({start, idle}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not start.done():
                self._starts.add(start)  # another slot will take the worker
            if not idle.done():
                idle.cancel()
            elif start.done():
                self._idle.put_nowait(idle.result())
        return start.result() if start.done() else idle.result()

    async def _start(self) -> Worker:
        """A worker that has loaded the workflow. One that is killed or lost with its machine is replaced."""
        killed = 0
        for _ in range(_LOST_STARTS):
            try:
                return await self._start_once()
            except MachineLostError:
                continue
            except KilledError as error:
                killed += 1
                if killed == _KILLED_STARTS:
                    raise self._unstarted(error) from None
        raise RftError(f"{_LOST_STARTS} workers in a row were lost while they started: check the nodes of the cluster")

    async def _start_once(self) -> Worker:
        python = self._python or sys.executable
        unusable, under = f"explorer.workers.python {python}: cannot be run", f"a worker process under {python}"
        try:
            worker = self._start_process(_MODULE, python=self._python, log=self.log)
        except OSError as error:
            raise UserError(f"{unusable} ({error})") from error
        self._workers.add(worker)
        try:
            refused = await self._placed(worker.ask_async("set_up", self._setup, wall_s=_START_S))
            if refused is not None:
                raise UserError(f"{under} cannot run {self._name!r}: {refused}")
        except OSError as error:
            self._drop(worker)
            raise UserError(f"{unusable} ({error})") from error
        except (MachineLostError, KilledError):
            self._drop(worker)
            raise
        except ChildError as error:
            self._drop(worker)
            raise self._unstarted(error) from None
        except BaseException:
            self._drop(worker)
            raise
        self._ready += 1
        return worker

    def _unstarted(self, error: ChildError) -> UserError:
        """The error of a worker that did not start, for the user."""
        timed_out = isinstance(error, AnswerTimeoutError)
        how = f"was not ready after {_START_S:.0f} s" if timed_out else f"{error.how} at its start"
        printed = f" It printed:\n{textwrap.indent(error.tail, '  ')}" if error.tail else ""
        return UserError(f"a worker process under {self._python or sys.executable} {how}.{printed}")

    async def _placed(self, set_up: Coroutine[Any, Any, str | None]) -> str | None:
        """Wait for ``set_up``; without limit if other workers run, because no node may have room for this one."""
        starting = asyncio.ensure_future(set_up)
        try:
            while not (await asyncio.wait({starting}, timeout=2 * _START_S))[0]:
                if not self._ready:
                    raise UserError(
                        f"no worker for {self._name!r} was placed within {2 * _START_S:.0f} s: no node of the cluster "
                        "has room; wait for its other work, add nodes, or lower explorer.workers.cpus"
                    )
            return await starting
        finally:
            starting.cancel()

    def _drop(self, worker: Worker) -> None:
        self._workers.discard(worker)
        worker.kill()


class WorkerSlot:
    """A worker for one attempt."""

    def __init__(self, pool: WorkerExecutor, worker: Worker) -> None:
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
            text = json_text(request, f"task {run.task.task_id}")
            self.reusable = False
            answer = await self._worker.ask_async("attempt", text, on_note=self._mark_down)
            self.reusable = not answer["tasks_left"]
            return self._result(answer, connection)
        except ChildError as error:
            connection.machine_lost = isinstance(error, MachineLostError)
            raise RemoteFailure(f"WorkerDied: the worker process {error.how} during the run") from None
        finally:
            if replicas is not None and home is not None:
                replicas.release(home, self._pool.tokens)

    def _result(self, message: dict[str, Any], connection: Connection) -> RunResult:
        connection.client_retries, connection.lost = message["client_retries"], message["connection_lost"]
        failed = message.get("failed")
        if failed is None:
            return result_from_json(message["result"])
        if failed["engine"]:
            raise EngineError(failed["error"].partition(": ")[2])
        raise RemoteFailure(failed["error"], failed["location"])

    def _mark_down(self, down: tuple[int, str, str]) -> None:
        """Mark a replica that the worker could not reach as down: its number, its address and why."""
        replicas, (number, url, why) = self._pool.replicas, down
        for replica in replicas.serving() if replicas is not None else []:
            if (replica.number, replica.url) == (number, url):
                replicas.mark_down(replica, why)  # type: ignore[union-attr]


def _starter(workflow: WorkerWorkflow) -> Callable[..., Worker]:
    """What starts a worker process: this machine, or the workflow's cluster."""
    if workflow.cluster is None:
        return Child
    return partial(workflow.cluster.worker, bundle=Bundle(workflow.cpus, resources=workflow.resources))


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
