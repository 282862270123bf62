"""The project, its processes and its registry as Dagster resources, by which the assets reach them.

Engine and trainer are found by their leases or else started, and outlive the run. ``RoundTables`` is the IO manager by
which assets of other people read the rounds of a project as tables.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pyarrow as pa

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.experience.file_names import is_round_key, round_number
from rft_platform.inference.interface import PolicyEngine
from rft_platform.online.project import open_project
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.round_tables import as_frame, round_table

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.training.service.trainer_client import TrainerClient


class ProjectResource(dg.ConfigurableResource):
    """The folder that holds all state of the project."""

    home: str = dg.EnvVar("RFT_HOME") if "RFT_HOME" in os.environ else ".rft"

    def open(self) -> Project:
        """Read the project's configuration; raises UserError if no project has been started in the folder."""
        return open_project(self.place)

    @property
    def place(self) -> Home:
        """The folder, with the places in it."""
        return Home(Path(self.home).absolute())

    @staticmethod
    def among(resources: Iterable[Any]) -> "ProjectResource | None":
        """The project of an asset with these resources, if it has one."""
        return next((each for each in resources if isinstance(each, ProjectResource)), None)


class EngineResource(dg.ConfigurableResource):
    """The processes that serve the policy."""

    project: dg.ResourceDependency[ProjectResource]  # not read: Dagster warns of a resource without a field

    def connect(self, opened: Project) -> PolicyEngine:
        """A healthy engine that serves some version of the project's policy."""
        from rft_platform.rounds.setup.side_engines import connect_evaluation_engine

        return connect_evaluation_engine(opened)


class TrainerResource(dg.ConfigurableResource):
    """The trainer's worker processes."""

    project: dg.ResourceDependency[ProjectResource]  # not read: Dagster warns of a resource without a field

    def connect(self, opened: Project) -> "TrainerClient":
        """A trainer group that is ready for commands."""
        from rft_platform.rounds.setup.connections import connect_trainer

        return connect_trainer(opened)


class RegistryResource(dg.ConfigurableResource):
    """MLflow at ``tracking_uri``; if that is empty, at the configured URI or the project's SQLite store."""

    tracking_uri: str = dg.EnvVar("MLFLOW_TRACKING_URI") if "MLFLOW_TRACKING_URI" in os.environ else ""

    def connect(self, opened: Project) -> "ModelRegistry":
        """The registry of the project's experiment and training run."""
        from rft_platform.rounds.setup.connections import connect_registry

        return connect_registry(opened, self.tracking_uri or None)


class RoundTables(dg.ConfigurableIOManager):
    """Loads rollouts, judged experiences and evaluation reports: ``def mine(judged_experiences: pd.DataFrame)``.

    An input of one round has the rows of that round. An input of several rounds, or of an asset without partitions, has
    those of all of them in one table, whose column ``round`` tells them apart.
    """

    project: dg.ResourceDependency[ProjectResource]

    def load_input(self, context: dg.InputContext) -> Any:
        """The rows as ``pandas.DataFrame`` (also without an annotation) or ``pyarrow.Table``."""
        wanted = context.dagster_type.typing_type
        name = f"{getattr(wanted, '__module__', '').partition('.')[0]}.{getattr(wanted, '__name__', wanted)}"
        if wanted is not Any and wanted is not pa.Table and name != "pandas.DataFrame":
            raise UserError(f"input {context.name}: annotated {name}; expected pandas.DataFrame or pyarrow.Table")
        rounds = [round_number(key) for key in context.asset_partition_keys if is_round_key(key)]
        table = round_table(self.project.open().store, context.asset_key.path[-1], rounds)
        return table if wanted is pa.Table else as_frame(table)

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        """Refuse: the platform's assets store their rows themselves."""
        raise UserError(f"{context.name}: this IO manager only loads the project's own assets; choose another one")
