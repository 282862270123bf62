"""TensorBoard output of a project's metrics, if ``monitor.monitor_type`` names it; MLflow logging is separate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rft_platform.experience.rounds import round_key
from rft_platform.registry.tensorboard import TensorBoardRun
from rft_platform.rounds.project import Project
from rft_platform.training.protocol import StepEvent


def monitor_steps(project: Project, round_number: int, steps: Sequence[StepEvent], policy: str | None = None) -> None:
    """Write the metrics of a round's optimiser steps. A retrained round is written again."""
    run = _tensorboard(project, policy)
    if run is not None and steps:
        run.log_steps(f"{round_key(round_number)}-train", steps)


def monitor_round(project: Project, round_number: int, metrics: Mapping[str, Any], prefix: str) -> None:
    """Write the metrics of a round, with the round as x axis. ``prefix`` (such as ``eval/``) names the phase."""
    run = _tensorboard(project)
    if run is not None and metrics:
        run.log_round(f"{round_key(round_number)}-{prefix.strip('/')}", round_number, metrics, prefix)


def _tensorboard(project: Project, policy: str | None = None) -> TensorBoardRun | None:
    if "tensorboard" not in project.config.monitor.monitor_type:
        return None
    given = project.config.monitor.tensorboard_dir
    folder = Path(given) if given else project.home.tensorboard
    of_policy = "" if policy is None else f"-{policy}"
    return TensorBoardRun(folder, f"{project.config.project}-{project.config.name}{of_policy}")
