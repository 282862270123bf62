"""The MLflow registry as a Dagster resource: runs, metrics, model versions and their aliases."""

import os
from typing import TYPE_CHECKING

import dagster as dg

from rft_platform.resources.project import ProjectResource

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry


class RegistryResource(dg.ConfigurableResource):
    """MLflow at ``tracking_uri``; if that is empty, at the configured URI or the project's SQLite store."""

    project: dg.ResourceDependency[ProjectResource]
    tracking_uri: str = dg.EnvVar("MLFLOW_TRACKING_URI") if "MLFLOW_TRACKING_URI" in os.environ else ""

    def connect(self) -> "ModelRegistry":
        """The registry of the project's experiment and training run."""
        from rft_platform.rounds.setup.connections import connect_registry

        return connect_registry(self.project.open(), self.tracking_uri or None)
