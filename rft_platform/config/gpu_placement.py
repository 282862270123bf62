"""Which GPUs of this machine the engines and the trainer use.

The engines take the first GPUs: those of the policy, of the auxiliary models, and of further policies. The trainer
takes the last ones. They share GPUs in mode ``colocate``, and on a machine with a single GPU. The two processes of an
online project (modes ``serve`` and ``train``) place both alike.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from rft_platform.config.schema.rft_config import RftConfig


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """GPUs by their position among those that this process may use."""

    engines: int  # they take the first ones
    trainer: range | None  # None: all, because the trainer shares them with the engines or has them alone
    shared: bool

    @property
    def trainer_count(self) -> int:
        """GPUs that only the trainer uses."""
        return 0 if self.trainer is None else len(self.trainer)


def gpu_count() -> int:
    """Number of CUDA devices that a process started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return len([name for name in names if name and name != "-1"])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def place(config: RftConfig, gpus: int) -> GpuPlacement:
    """The placement on a machine with ``gpus`` GPUs; ``check_config`` refuses one that does not fit."""
    engines, ranks = _engine_gpus(config), config.trainer.nproc
    trains = config.mode in ("both", "train", "colocate") or config.online  # mode serve: another process trains
    if not gpus or not engines or not trains:
        return GpuPlacement(engines, None, shared=False)
    if config.mode == "colocate" or engines + ranks > gpus:
        return GpuPlacement(engines, None, shared=True)
    return GpuPlacement(engines, range(gpus - ranks, gpus), shared=False)


def _engine_gpus(config: RftConfig) -> int:
    if config.engine.device == "cpu" or (config.mode == "train" and not config.online):
        return 0
    explorer = config.explorer
    further = explorer.rollout_model.tensor_parallel_size * len(config.policies)
    return explorer.policy_gpus + sum(model.devices for model in explorer.auxiliary_models) + further


def visible_devices(own: range) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a process that may use only ``own`` of this process's devices."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        return ",".join(map(str, own))
    visible = [device.strip() for device in devices.split(",")]
    return ",".join(visible[index] for index in own)
