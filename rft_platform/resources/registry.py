"""The MLflow registry as a resource: runs, metrics, model versions and their aliases."""

import os
from typing import TYPE_CHECKING

import dagster as dg

from rft_platform.resources.project import ProjectResource

if TYPE_CHECKING:
    from rft_platform.registry.models import ModelRegistry


class RegistryResource(dg.ConfigurableResource):
    """MLflow by URL, or the SQLite store below the project's folder where none is given."""

    project: dg.ResourceDependency[ProjectResource]
    tracking_uri: str = dg.EnvVar("MLFLOW_TRACKING_URI") if "MLFLOW_TRACKING_URI" in os.environ else ""

    def connect(self) -> "ModelRegistry":
        """The registry, with the project's experiment and training run at hand."""
        from rft_platform.rounds.processes import connect_registry

        return connect_registry(self.project.open(), self.tracking_uri or None)
