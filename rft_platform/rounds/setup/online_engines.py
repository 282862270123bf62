"""Engines of an online project beside the one that serves production traffic.

Evaluations have a separate engine, so that users never get a version that did not pass a gate. If the machine has no
GPU left for it, evaluations use the serving engine. The candidate of a release has a separate engine, too.
"""

from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError
from rft_platform.config.gpu_placement import CANDIDATE_ENGINE, EVALUATION_ENGINE, engine_gpus, gpu_count, place
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import base_model_folder, connect_engine, policy_spec, start_engine

if TYPE_CHECKING:
    from rft_platform.inference.client import EngineClient


def connect_evaluation_engine(project: Project) -> PolicyEngine:
    """The engine that evaluations and warm starts use."""
    if project.traffic is None or shares_engine(project):
        return connect_engine(project)
    return start_engine(project, EVALUATION_ENGINE, base_model_folder(project), policy_spec(project))


def connect_candidate_engine(project: Project) -> "EngineClient":
    """The engine that serves the candidate of a release. Raises UserError if there is no GPU for it."""
    if not _has_devices(project, CANDIDATE_ENGINE):
        raise UserError(
            "no GPU is left for the engine of a candidate: lower explorer.rollout_model.engine_num or trainer.nproc; "
            "with engine.urls there is none"
        )
    return start_engine(project, CANDIDATE_ENGINE, base_model_folder(project), policy_spec(project))


def shares_engine(project: Project) -> bool:
    """Whether evaluations use the engine that serves production traffic."""
    return not _has_devices(project, EVALUATION_ENGINE)


def _has_devices(project: Project, name: str) -> bool:
    config, gpus = project.config, gpu_count()
    if config.engine.urls:
        return False  # the engines that somebody else runs are all there are
    if config.engine.device == "cpu" or not gpus:
        return True
    return engine_gpus(config)[name, 0].stop <= gpus - place(config, gpus).trainer_count
