"""Engines of an online project beside the one that serves production traffic.

Evaluations have their own engine, so that users never get a version that did not pass a gate. The candidate of a
release has its own engine too. If the machine has no GPU left for it, evaluations use the serving engine.
"""

from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError
from rft_platform.config.gpu_placement import gpu_count, place
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import base_model_folder, connect_engine, policy_spec

if TYPE_CHECKING:
    from rft_platform.inference.client import EngineClient

EVALUATION, CANDIDATE = "evaluation", "candidate"  #: names of the engines and of their leases
_ORDER = (EVALUATION, CANDIDATE)


def connect_evaluation_engine(project: Project) -> PolicyEngine:
    """The engine that evaluations and warm starts use."""
    if not project.config.online or shares_engine(project):
        return connect_engine(project)
    return _connect(project, EVALUATION)


def connect_candidate_engine(project: Project) -> "EngineClient":
    """The engine that serves the candidate of a release. Raises UserError if there is no GPU for it."""
    if not _has_devices(project, CANDIDATE):
        raise UserError(
            "no GPU is left for the engine of a candidate: lower explorer.rollout_model.engine_num or trainer.nproc"
        )
    return _connect(project, CANDIDATE)


def shares_engine(project: Project) -> bool:
    """Whether evaluations use the engine that serves production traffic."""
    return not _has_devices(project, EVALUATION)


def _connect(project: Project, name: str) -> "EngineClient":
    from rft_platform.inference.launch.launcher import find_or_start_engine
    from rft_platform.inference.launch.pool_start import replica_gpus

    config, size = project.config, project.config.explorer.rollout_model.tensor_parallel_size
    rank = config.engine.max_lora_rank
    if rank is None:
        rank = max((adapter.lora_rank for adapter in config.model.lora_configs), default=0)
    on_gpu = config.engine.device != "cpu" and gpu_count() > 0
    return find_or_start_engine(
        base_model_folder(project),
        project.home.leases,
        project.home.logs,
        policy_spec(config, lora_rank=rank),
        name=name,
        gpus=replica_gpus(_ORDER.index(name), size, place(config, gpu_count()).engines) if on_gpu else None,
    )


def _has_devices(project: Project, name: str) -> bool:
    gpus = gpu_count()
    if project.config.engine.device == "cpu" or not gpus:
        return True
    placement = place(project.config, gpus)
    size = project.config.explorer.rollout_model.tensor_parallel_size
    needed = placement.engines + size * (_ORDER.index(name) + 1)
    return needed <= gpus - placement.trainer_count
