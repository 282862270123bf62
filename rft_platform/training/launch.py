"""Convert the configuration to a trainer group's launch options, and these to a command line. Does not import torch.

A group is one process, or torchrun with several ranks on one or more nodes.

With several nodes, the control plane runs on the first node (``node_rank`` 0), which has rank 0, the lease and the
command port. The other nodes are started by hand or by a job scheduler (``join.py``) and connect to the first node's
``endpoint``. All nodes must see checkpoints and rounds under the same paths.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from rft_platform.common.errors import UserError
from rft_platform.config.memory_plan import MemoryChoice
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.training.protocol import HEARTBEAT_TIMEOUT_S, Layout

START_TIMEOUT_S = 180.0
_WORKER = "rft_platform.training.service.worker"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which the nodes of a group connect to each other."""

    nodes: int = 1
    endpoint: str = ""  # ``host:port`` on the first node; the port must be free
    timeout_s: float = 900.0  # how long a node waits for the others

    def __post_init__(self) -> None:
        host, _, port = self.endpoint.rpartition(":")
        if self.nodes > 1 and not (host and port.isdigit()):
            raise UserError(
                f"a trainer group on {self.nodes} nodes connects to a host and port of the first node, but "
                f"trainer.rendezvous.endpoint is {self.endpoint!r}: set it to HOST:PORT"
            )


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Launch options of a trainer group, and the folders of its lease and log."""

    leases: Path
    logs: Path
    nproc: int  # ranks per node
    threads: int
    dtype: str
    device: str
    idle_timeout_s: float
    layout: Layout = field(default_factory=Layout)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    gpus: str | None = None  # CUDA_VISIBLE_DEVICES of the group; None: the caller's
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S  # the group is ended after this time without a heartbeat

    @property
    def lease(self) -> Path:
        """The lease file."""
        return self.leases / "trainer.json"

    @property
    def log(self) -> Path:
        """Standard output and error of all ranks of this node."""
        return self.logs / "trainer.log"

    @property
    def ranks(self) -> int:
        """Number of ranks of the whole group."""
        return self.nproc * self.rendezvous.nodes

    @property
    def start_timeout_s(self) -> float:
        """Time limit for starting the group."""
        return START_TIMEOUT_S + (self.rendezvous.timeout_s if self.rendezvous.nodes > 1 else 0.0)


def configured_layout(config: RftConfig, memory: MemoryChoice) -> Layout:
    """Return the layout: how the ranks store and compute the models."""
    settings = config.trainer
    return Layout(
        reduce_dtype=settings.reduce_dtype,
        cpu_offload=memory.cpu_offload,
        gradient_checkpointing=memory.gradient_checkpointing,
        compile=settings.torch_compile,
    )


def configured_rendezvous(config: RftConfig) -> Rendezvous:
    """Return the rendezvous. Without an endpoint the group has one node, for any ``cluster.node_num``."""
    rendezvous = config.trainer.rendezvous
    if rendezvous.endpoint is None:
        return Rendezvous()
    return Rendezvous(config.cluster.node_num, rendezvous.endpoint, rendezvous.timeout_s)


def command(spec: TrainerSpec, node_rank: int = 0) -> list[str]:
    """Return the command line of one node. A single rank needs no torchrun, which adds 1.8 s and a second process."""
    options = {
        "--lease": spec.lease.absolute(), "--idle-timeout": spec.idle_timeout_s, "--threads": spec.threads,
        "--dtype": spec.dtype, "--device": spec.device, "--reduce-dtype": spec.layout.reduce_dtype,
        "--compile": "auto" if spec.layout.compile is None else "yes" if spec.layout.compile else "no",
    }  # fmt: skip
    flags = {
        "--cpu-offload": spec.layout.cpu_offload,
        "--gradient-checkpointing": spec.layout.gradient_checkpointing,
    }
    arguments = [str(part) for option in options.items() for part in option]
    arguments += [flag for flag, wanted in flags.items() if wanted]
    arguments += [] if spec.gpus is None else ["--gpus", spec.gpus]
    return [sys.executable, "-m", *_launcher(spec, node_rank), _WORKER, *arguments]


def _launcher(spec: TrainerSpec, node_rank: int) -> list[str]:
    rendezvous, ranks = spec.rendezvous, f"--nproc-per-node={spec.nproc}"
    if spec.ranks == 1:
        return []
    if rendezvous.nodes == 1:
        return ["torch.distributed.run", "--standalone", ranks, "-m"]
    host, _, port = rendezvous.endpoint.rpartition(":")
    where = [
        f"--nnodes={rendezvous.nodes}",
        f"--node-rank={node_rank}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]
    return ["torch.distributed.run", *where, f"--rdzv-conf=timeout={rendezvous.timeout_s:.0f}", ranks, "-m"]
