"""The project, its processes and its registry as Dagster resources, by which the assets reach them.

Engine and trainer are found by their leases or else started, and outlive the run.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from rft_platform.config.home import Home
from rft_platform.inference.interface import PolicyEngine
from rft_platform.online.project import open_project
from rft_platform.rounds.project.project import Project

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.training.service.trainer_client import TrainerClient


class ProjectResource(dg.ConfigurableResource):
    """The folder that holds all state of the project."""

    home: str = dg.EnvVar("RFT_HOME") if "RFT_HOME" in os.environ else ".rft"

    def open(self) -> Project:
        """Read the project's configuration; raises UserError if no project has been started in the folder."""
        return open_project(Home(Path(self.home).absolute()))


class EngineResource(dg.ConfigurableResource):
    """The processes that serve the policy."""

    project: dg.ResourceDependency[ProjectResource]

    def connect(self) -> PolicyEngine:
        """A healthy engine that serves some version of the project's policy."""
        from rft_platform.rounds.setup.online_engines import connect_evaluation_engine

        return connect_evaluation_engine(self.project.open())


class TrainerResource(dg.ConfigurableResource):
    """The trainer's worker processes."""

    project: dg.ResourceDependency[ProjectResource]

    def connect(self) -> "TrainerClient":
        """A trainer group that is ready for commands."""
        from rft_platform.rounds.setup.connections import connect_trainer

        return connect_trainer(self.project.open())


class RegistryResource(dg.ConfigurableResource):
    """MLflow at ``tracking_uri``; if that is empty, at the configured URI or the project's SQLite store."""

    project: dg.ResourceDependency[ProjectResource]
    tracking_uri: str = dg.EnvVar("MLFLOW_TRACKING_URI") if "MLFLOW_TRACKING_URI" in os.environ else ""

    def connect(self) -> "ModelRegistry":
        """The registry of the project's experiment and training run."""
        from rft_platform.rounds.setup.connections import connect_registry

        return connect_registry(self.project.open(), self.tracking_uri or None)
