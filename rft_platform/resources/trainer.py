"""The trainer group as a Dagster resource: found by its lease, else started; it outlives the run."""

from typing import TYPE_CHECKING

import dagster as dg

from rft_platform.resources.project import ProjectResource

if TYPE_CHECKING:
    from rft_platform.training.service.trainer_client import TrainerClient


class TrainerResource(dg.ConfigurableResource):
    """The trainer's worker processes."""

    project: dg.ResourceDependency[ProjectResource]

    def connect(self) -> "TrainerClient":
        """A trainer group that is ready for commands."""
        from rft_platform.rounds.setup.connections import connect_trainer

        return connect_trainer(self.project.open())
