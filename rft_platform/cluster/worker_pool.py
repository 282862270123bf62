"""A pool of workers that are set up alike: started on demand, lent one at a time, replaced when they are lost."""

import asyncio
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rft_platform.cluster.child import AnswerTimeoutError, ChildError, KilledError, MachineLostError
from rft_platform.cluster.interface import Worker
from rft_platform.common.errors import RftError, UserError

_START_S = 300.0  # time limit for the start, which imports user code and its packages
_LOST_STARTS = 20  # a cluster needs some seconds to notice that a node is gone
_KILLED_STARTS = 3  # by SIGKILL: one may be chance, several are the kernel's when memory runs out


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """How the workers of a pool are started and set up."""

    name: str  # of the user code that they load, for messages
    module: str  # with the functions that they call; its ``set_up`` returns None, or why it cannot load the code
    setup: bytes  # the argument of ``set_up``, as JSON
    start: Callable[..., Worker]  # ``Cluster.worker``, or ``Child``
    log_name: str
    python: str | None = None  # another interpreter; None: that of the node
    log_folder: Path | None = None  # None: a temporary one
    environment_s: float = 0.0  # the longest time that a node may need to build their environment


@dataclass(slots=True)
class Lent:
    """A worker for one call."""

    worker: Worker
    reusable: bool = False  # set it if the worker may be lent again; otherwise it is killed


class WorkerPool:
    """Up to ``count`` workers, started on demand. None is left running when the context ends."""

    def __init__(self, kind: WorkerKind, count: int) -> None:
        self._kind = kind
        self._slots = asyncio.Semaphore(count)
        self._placing_s = 2 * _START_S + kind.environment_s
        self._workers: set[Worker] = set()
        self._free: set[Worker] = set()  # that have loaded the code and are not lent
        self._ready = 0  # workers that have loaded the code; some of them may have ended
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._starts: set[asyncio.Task[Worker]] = set()  # starts for which no slot waits

    async def __aenter__(self) -> Self:
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
        return (self._kind.log_folder or Path(self._folder.name)) / self._kind.log_name

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[Lent]:
        """Yield a worker that is ready; kill it afterwards unless it is marked as reusable."""
        async with self._slots:
            while not (worker := await self._next()).is_alive:
                self._drop(worker)
            lent = Lent(worker)
            self._free.discard(worker)
            try:
                yield lent
            finally:
                if lent.reusable:
                    self._free.add(worker)
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
        finally:  # also if this slot is cancelled: another one takes what is ready
            if idle.done():
                self._idle.put_nowait(idle.result())
            else:
                idle.cancel()
            if not start.done():
                self._starts.add(start)
            elif start.exception() is None:
                self._idle.put_nowait(start.result())
        if start.done():
            start.result()  # raises the error of a failed start
        return self._idle.get_nowait()

    async def _start(self) -> Worker:
        """A worker that has loaded the code. One that is killed or lost with its machine is replaced."""
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
        kind = self._kind
        python = kind.python or sys.executable
        unusable = f"explorer.workers.python {python}: cannot be run"
        try:
            worker = kind.start(kind.module, python=kind.python, log=self.log)
        except OSError as error:
            raise UserError(f"{unusable} ({error})") from error
        self._workers.add(worker)
        under = f"a worker process under {python}"
        try:
            refused = await self._placed(worker.ask_async("set_up", kind.setup, wall_s=_START_S))
            if refused is not None:
                raise UserError(f"{under} cannot run {kind.name!r}: {refused}")
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
        self._free.add(worker)
        return worker

    def _unstarted(self, error: ChildError) -> UserError:
        """The error of a worker that did not start, for the user."""
        timed_out = isinstance(error, AnswerTimeoutError)
        how = f"was not ready after {_START_S:.0f} s" if timed_out else f"{error.how} at its start"
        printed = f" It printed:\n{textwrap.indent(error.tail, '  ')}" if error.tail else ""
        return UserError(f"a worker process under {self._kind.python or sys.executable} {how}.{printed}")

    async def _placed(self, set_up: Coroutine[Any, Any, str | None]) -> str | None:
        """Wait for ``set_up``; without limit if other workers run, because no node may have room for this one."""
        starting = asyncio.ensure_future(set_up)
        try:
            while not (await asyncio.wait({starting}, timeout=self._placing_s))[0]:
                if not self._ready:
                    raise UserError(
                        f"no worker for {self._kind.name!r} was placed within {self._placing_s:.0f} s: no node of the "
                        "cluster has room; wait for its other work, add nodes, or lower explorer.workers.cpus"
                    )
            return await starting
        finally:
            starting.cancel()

    def _drop(self, worker: Worker) -> None:
        """End a worker. If it was lost with its machine, end the free ones there, too: each would fail another call."""
        self._workers.discard(worker)
        self._free.discard(worker)
        worker.kill()
        for other in self._free:
            if other.is_lost_with(worker):
                other.kill()
