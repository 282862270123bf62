"""Which GPUs of this machine the engines and the trainer use.

The engines take the first GPUs, in this order: engines of the first policy, of the auxiliary models, of the other
policies, and in an online project ``ONLINE_ENGINES``. The trainer takes the last GPUs. Engines and trainer share GPUs
in mode ``colocate`` and on a machine with a single GPU. If two commands run one project (mode ``serve`` or ``explore``,
and mode ``train``), both compute the same placement.
"""

import os
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rft_platform.common.errors import UserError
from rft_platform.config.engine_choice import resolve_kind
from rft_platform.config.schema.rft_config import RftConfig

POLICY_ENGINE = "engine"  #: name of the first policy's engine
EVALUATION_ENGINE, CANDIDATE_ENGINE = "evaluation", "candidate"
ONLINE_ENGINES = (EVALUATION_ENGINE, CANDIDATE_ENGINE)  #: in addition to the engine that serves production traffic
_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-\S*")


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """The GPUs of engines and trainer, as positions among the GPUs that this process may use."""

    engines: int  # number of GPUs of the engines; they are the first ones
    trainer: range | None  # None: all, because the trainer shares them with the engines or has them alone
    shared: bool

    @property
    def trainer_count(self) -> int:
        """Number of GPUs reserved for the trainer; 0 if it shares GPUs with the engines or has no fixed ones."""
        return 0 if self.trainer is None else len(self.trainer)


def visible_gpus() -> list[str] | None:
    """The names in ``CUDA_VISIBLE_DEVICES`` up to the first that is no GPU, as CUDA reads them; None: it is not set.

    A name is an index or the start of an identifier. ``-1``, ``none`` or SLURM's ``NoDevFiles`` hide all GPUs.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return None
    return list(takewhile(_GPU_NAME.fullmatch, (name.strip() for name in names.split(","))))


def gpu_count() -> int:
    """Number of CUDA devices that a process started here would see."""
    visible = visible_gpus()
    if visible is not None:
        return len(visible)
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(Path("/dev/dxg").exists())  # dxg: WSL, one device


def engine_kind(config: RftConfig, gpus: int) -> str:
    """The engine that a project starts on a machine with ``gpus`` GPUs: ``transformers`` or ``vllm``.

    With Ray, "auto" looks at this machine. An ``engine.python`` that cannot be started counts as one without vLLM; a
    start refuses it.
    """
    engine, here = config.engine, gpus if config.cluster.kind == "local" else gpu_count()
    try:
        return resolve_kind(engine.kind, engine.device, engine.python, here)
    except UserError:
        return "transformers"


def place(config: RftConfig, gpus: int) -> GpuPlacement:
    """The placement on a machine with ``gpus`` GPUs; the checks refuse one that needs more GPUs."""
    engines, ranks = _engine_gpus(config), config.trainer.nproc
    trains = config.trains or config.online  # mode serve: another process trains
    if not gpus or not engines or not trains:
        return GpuPlacement(engines, None, shared=False)
    if config.mode == "colocate" or engines + ranks > gpus:
        return GpuPlacement(engines, None, shared=True)
    return GpuPlacement(engines, range(gpus - ranks, gpus), shared=False)


def _engine_gpus(config: RftConfig) -> int:
    explores = config.online or bool(config.buffer.explorer_input.explored)  # by any process
    if config.engine.device == "cpu" or (config.mode == "train" and not explores):
        return 0
    return engine_gpus(config)[EVALUATION_ENGINE, 0].start


def engine_gpus(config: RftConfig) -> dict[tuple[str, int], range]:
    """Positions of the GPUs of each engine process, by the engine's name and the number of the replica."""
    explorer, size = config.explorer, config.explorer.rollout_model.tensor_parallel_size
    firsts = [number // explorer.engines_per_gpu * size for number in range(explorer.rollout_model.engine_num)]
    found = {(POLICY_ENGINE, number): range(first, first + size) for number, first in enumerate(firsts)}
    sizes = {
        (model.lease, number): model.tensor_parallel_size
        for model in explorer.auxiliary_models
        for number in range(0 if model.base_url else model.engine_num)
    }
    sizes |= dict.fromkeys(
        [*((policy.lease, 0) for policy in config.policies), *((n, 0) for n in ONLINE_ENGINES)], size
    )
    end = 0 if config.engine.urls else explorer.policy_gpus
    for process, gpus in sizes.items():
        found[process] = range(end, end + gpus)
        end += gpus
    return found


def on_trainer_gpus(config: RftConfig, gpus: int, name: str, number: int) -> bool:
    """Whether an engine process of this machine uses a GPU of a trainer rank; the ranks use the first GPUs then."""
    shared = config.cluster.kind == "local" and place(config, gpus).shared
    return shared and engine_gpus(config)[name, number].start < config.trainer.nproc


def engine_share(config: RftConfig, gpus: int, name: str = POLICY_ENGINE) -> float:
    """Number of GPUs that a process of engine ``name`` reserves on a cluster with ``gpus`` GPUs, without positions."""
    if not gpus or config.engine.device == "cpu":
        return 0.0
    for model in config.explorer.auxiliary_models:
        if model.lease == name:
            return float(model.tensor_parallel_size)
    return config.explorer.rollout_model.tensor_parallel_size / config.explorer.engines_per_gpu


def visible_devices(own: range) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a process that may use only the devices at positions ``own`` of this process's."""
    visible = visible_gpus()
    return ",".join(map(str, own) if visible is None else (visible[index] for index in own))
