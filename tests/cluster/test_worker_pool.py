"""The pool of workers: which of them it lends after a call has found one lost."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rft_platform.cluster.child import MachineLostError
from rft_platform.cluster.interface import Worker
from rft_platform.cluster.worker_pool import WorkerKind, WorkerPool


class Machines:
    """Where workers start, and which machines are lost."""

    def __init__(self) -> None:
        self.here, self.lost = "first", set[str]()

    def start(self, *_: Any, **__: Any) -> "MachineWorker":
        return MachineWorker(self, self.here)


class MachineWorker:
    """A worker that answers with its machine."""

    def __init__(self, machines: Machines, machine: str) -> None:
        self.machines, self.machine = machines, machine
        self.is_alive, self.was_lost = True, False

    def is_lost_with(self, other: Worker) -> bool:
        return isinstance(other, MachineWorker) and other.was_lost and other.machine == self.machine

    def kill(self) -> None:
        self.is_alive = False

    async def ask_async(
        self,
        function: str,
        *arguments: Any,
        wall_s: float | None = None,
        on_note: Callable[[Any], None] | None = None,
    ) -> Any:
        if not self.is_alive or self.machine in self.machines.lost or function == "lose":
            self.is_alive, self.was_lost = False, True
            raise MachineLostError(f"{function}: lost", "was lost with its actor or its node")
        return None if function == "set_up" else self.machine


async def called(pool: WorkerPool, function: str = "judge") -> str:
    """The machine of the worker that is lent for a call."""
    async with pool.lent() as lent:
        machine: str = await lent.worker.ask_async(function)
        lent.reusable = True
        return machine


async def lend(stack: AsyncExitStack, pool: WorkerPool, count: int) -> list[Any]:
    """Lend ``count`` workers until the end of ``stack``; then they are idle."""
    found = [await stack.enter_async_context(pool.lent()) for _ in range(count)]
    for lent in found:
        lent.reusable = True
    return found


@pytest.fixture
def machines() -> Machines:
    return Machines()


@pytest.fixture
def pool(machines: Machines) -> WorkerPool:
    return WorkerPool(WorkerKind("judge", "module", b"", machines.start, "log"), 8)


async def test_one_lost_call_drops_the_idle_workers_of_its_machine(pool: WorkerPool, machines: Machines) -> None:
    async with pool:
        async with AsyncExitStack() as stack:
            await lend(stack, pool, 4)
        machines.lost.add("first")
        machines.here = "second"
        with pytest.raises(MachineLostError):
            await called(pool)
        assert [await called(pool) for _ in range(3)] == ["second"] * 3


async def test_workers_of_other_machines_and_lent_ones_are_kept(pool: WorkerPool, machines: Machines) -> None:
    """The loss of one process must not end the calls of others on its machine."""
    async with pool, AsyncExitStack() as later:
        (busy,) = await lend(later, pool, 1)
        with pytest.raises(MachineLostError):
            async with pool.lent() as victim:
                machines.here = "second"
                async with AsyncExitStack() as stack:
                    others = {lent.worker for lent in await lend(stack, pool, 2)}
                await victim.worker.ask_async("lose")
        assert await busy.worker.ask_async("judge") == "first"
        async with AsyncExitStack() as stack:
            assert {lent.worker for lent in await lend(stack, pool, 2)} == others


async def test_the_worker_of_a_cancelled_slot_is_lent_to_the_next(machines: Machines) -> None:
    pool = WorkerPool(WorkerKind("judge", "module", b"", machines.start, "log"), 1)
    async with pool:
        cancelled = asyncio.create_task(called(pool))
        while not pool._ready:  # noqa: ASYNC110
            await asyncio.sleep(0)
        cancelled.cancel()  # in the turn of the event loop in which its worker is ready
        await asyncio.wait({cancelled})
        assert cancelled.cancelled()
        assert await called(pool) == "first"
        assert len(pool._workers) == 1
