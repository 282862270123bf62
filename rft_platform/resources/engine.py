"""The policy engine as a Dagster resource: found by its lease, else started; it outlives the run."""

import dagster as dg

from rft_platform.inference.interface import PolicyEngine
from rft_platform.resources.project import ProjectResource


class EngineResource(dg.ConfigurableResource):
    """The processes that serve the policy."""

    project: dg.ResourceDependency[ProjectResource]

    def connect(self) -> PolicyEngine:
        """A healthy engine that serves some version of the project's policy."""
        from rft_platform.rounds.setup.online_engines import connect_evaluation_engine

        return connect_evaluation_engine(self.project.open())
