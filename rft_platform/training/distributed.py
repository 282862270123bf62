"""The ranks of a trainer group, seen from one of them, and their collective operations."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rft_platform.common.errors import RftError
from rft_platform.training.protocol import Layout, error_message, raise_error

#: Ranks wait for the next command in a collective operation. Only the idle time-out of the group ends this wait.
WAIT_FOR_COMMANDS = timedelta(days=30)


class Reduce(Protocol):
    """All-reduce of a float64 vector on the CPU over the ranks; every rank gets the result."""

    def __call__(self, values: Tensor, op: Literal["sum", "max"]) -> Tensor: ...


def one_rank(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
    """``Reduce`` for a group of one rank."""
    return values


def most(count: int, reduce: Reduce) -> int:
    """Return the maximum of ``count`` over all ranks."""
    return int(reduce(torch.tensor([count], dtype=torch.float64), "max").item())


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place in the group.

    Control messages are JSON over gloo, never pickles. A rank that dies closes its connections, so the others fail
    immediately instead of waiting.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    layout: Layout = field(default_factory=Layout)  # layout of all models of the group

    @classmethod
    def join(cls, device: str = "auto", layout: Layout | None = None) -> "Ranks":
        """Join the group that ``torchrun`` describes in the environment; without torchrun, form a group of one.

        ``device`` is ``cpu``, ``cuda`` or ``auto`` (CUDA if available). A rank uses the GPU of its local rank.
        ``layout.reduce_once`` holds only if it does on every rank.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        on_cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        layout = layout or Layout()
        layout.check("cuda" if on_cuda else "cpu")
        if on_cuda:
            torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        ranks = cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=torch.device("cuda", local_rank) if on_cuda else torch.device("cpu"),
            control=dist.new_group(backend="gloo", timeout=WAIT_FOR_COMMANDS),
            layout=layout,
        )
        # Each node chooses its layout, and ``reduce_once`` decides which collective operations a rank calls.
        once = not ranks.largest(float(not layout.reduce_once))
        return replace(ranks, layout=replace(layout, reduce_once=once))

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0: only rank 0 communicates with callers and writes the shared files."""
        return self.rank == 0

    def mesh(self) -> DeviceMesh:
        """Return a one-dimensional mesh of all ranks."""
        return init_device_mesh(self.device.type, (self.world_size,))

    def reduce(self, values: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """All-reduce a CPU tensor; every rank gets the result."""
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.control)
        return values

    def total(self, value: float) -> float:
        """Sum a number over the ranks."""
        return float(self.reduce(torch.tensor([value], dtype=torch.float64), "sum"))

    def largest(self, value: float) -> float:
        """Maximum of a number over the ranks."""
        return float(self.reduce(torch.tensor([value], dtype=torch.float64), "max"))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the JSON value of rank ``source`` on every rank; the values of other ranks are ignored."""
        if self.world_size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == source else b""
        length = torch.tensor([len(data)])
        dist.broadcast(length, source, group=self.control)
        body = torch.frombuffer(bytearray(data or int(length)), dtype=torch.uint8)
        dist.broadcast(body, source, group=self.control)
        return json.loads(body.numpy().tobytes())

    def from_first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 only and return its JSON result on every rank. An RftError is raised on all ranks."""
        answer: dict[str, Any] = {}
        if self.is_first:
            try:
                answer = {"value": work()}
            except RftError as error:
                if self.world_size == 1:
                    raise
                answer = error_message(error)
        answer = self.broadcast(answer)
        if "value" not in answer:
            raise_error(answer)
        return answer["value"]

    @contextmanager
    def failing_together(self) -> Iterator[Reduce]:
        """Work that can raise an RftError on some ranks only: the other ranks then raise the error of the first.

        All ranks must enter it, and use the all-reduce that it yields and no other collective operation. Before each
        all-reduce, and at the end, the ranks tell each other whether they failed, so no rank waits for a failed one.
        """
        agreed = False

        def agree(error: RftError | None = None) -> None:
            nonlocal agreed
            first = self.world_size - int(self.largest(0 if error is None else self.world_size - self.rank))
            if first == self.world_size:
                return
            agreed = True
            answer = self.broadcast(None if error is None else error_message(error), first)
            if error is None:
                raise_error(answer)

        def reduce(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
            agree()
            return self.reduce(values, op)

        try:
            yield reduce
        except RftError as error:
            if not agreed:
                agree(error)
            raise
        agree()

    def leave(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()
