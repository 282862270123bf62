"""The declaration of a trainer group as a service. Does not import torch.

A group is one process, or torchrun with several ranks on one or more nodes.

With several nodes, the control plane runs on the first node (``node_rank`` 0), which has rank 0, the lease and the
command port. The other nodes are started by hand or by a job scheduler (``join.py``) and connect to the first node's
``trainer.rendezvous.endpoint``. All nodes must see checkpoints and rounds under the same paths.
"""

import json
from dataclasses import asdict
from pathlib import Path

import rft_platform
from rft_platform.cluster.interface import Bundle, Group, Service
from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_json
from rft_platform.common.user_code import OWN_SAFE_PATH, SAFE_PATH
from rft_platform.config.memory_plan import MemoryChoice
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.training.protocol import PREFIX, Layout

TRAINER = "trainer"  # name of the service
START_TIMEOUT_S, STOP_TIMEOUT_S = 180.0, 10.0
ANY_ENDPOINT = "any:0"  # Ray's cluster chooses the endpoint
_WORKER = "rft_platform.training.service.worker"


def trainer_service(
    *,
    nproc: int = 1,
    threads: int = 1,
    dtype: str = "auto",
    idle_timeout_s: float = 900.0,
    device: str = "auto",
    layout: Layout = Layout(),
    group: Group | None = None,
    gpus: str | None = None,
    reserved_gpus: float = 0.0,
) -> Service:
    """The declaration of a trainer group of ``nproc`` ranks, or of ``group``.

    ``dtype`` is ``auto`` (bfloat16 on CUDA, else float32), ``float32`` or ``bfloat16``; ``device`` is ``auto``, ``cpu``
    or ``cuda``. A group that runs other code than is installed now is another one.
    """
    ranks = group or Group(nproc)
    host, _, port = ranks.endpoint.rpartition(":")
    if ranks.nodes > 1 and not (host and port.isdigit()):
        raise UserError(
            f"a trainer group on {ranks.nodes} nodes connects to a host and port of the first node, but "
            f"trainer.rendezvous.endpoint is {ranks.endpoint!r}: set it to HOST:PORT"
        )
    options = {"threads": threads, "dtype": dtype, "device": device, "layout": asdict(layout)}
    return Service(
        TRAINER,
        _WORKER,
        (json.dumps(options),),
        digest=digest_json([options, ranks.nodes, ranks.size, gpus, _code_changed_at()]),
        env={"PYTHONUNBUFFERED": "1", SAFE_PATH: OWN_SAFE_PATH},
        bundle=Bundle(threads, gpus, reserved_gpus),
        group=ranks,
        idle_timeout_s=idle_timeout_s,
        start_timeout_s=START_TIMEOUT_S + (ranks.timeout_s if ranks.nodes > 1 else 0.0),
        grace_s=STOP_TIMEOUT_S,
        shutdown_path=f"{PREFIX}shutdown",
        reads_home=True,
    )


def configured_service(
    config: RftConfig, memory: MemoryChoice, gpus: str | None, reserved_gpus: float = 0.0
) -> Service:
    """The trainer group of a project. Without Ray and an endpoint it has one node."""
    settings, meeting = config.trainer, config.trainer.rendezvous
    group, nodes = Group(settings.nproc), config.trainer_nodes
    if config.cluster.kind == "ray":
        group = Group(settings.nproc, nodes, ANY_ENDPOINT, meeting.timeout_s)
    elif meeting.endpoint is not None:
        group = Group(settings.nproc, nodes, meeting.endpoint, meeting.timeout_s)
    return trainer_service(
        threads=settings.threads,
        dtype=settings.dtype,
        idle_timeout_s=settings.idle_timeout_s,
        layout=Layout(
            reduce_dtype=settings.reduce_dtype,
            reduce_once=memory.reduce_once,
            cpu_offload=memory.cpu_offload,
            gradient_checkpointing=memory.gradient_checkpointing,
            frees_gpu=memory.engine_sleeps,
            compile=settings.torch_compile,
        ),
        group=group,
        gpus=gpus,
        reserved_gpus=reserved_gpus,
    )


def _code_changed_at() -> float:
    """Modification time of the package's newest source file, in seconds since the epoch."""
    return max(file.stat().st_mtime for file in Path(rft_platform.__file__).parent.rglob("*.py"))
