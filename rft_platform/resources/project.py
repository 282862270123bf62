"""The project of a code location as a Dagster resource: folder, configuration, store."""

import os
from pathlib import Path

import dagster as dg

from rft_platform.config.home import Home
from rft_platform.rounds.project.project import Project


class ProjectResource(dg.ConfigurableResource):
    """The folder that holds all state of the project."""

    home: str = dg.EnvVar("RFT_HOME") if "RFT_HOME" in os.environ else ".rft"

    def open(self) -> Project:
        """Read the project's configuration; raises UserError if no project has been started in the folder."""
        return Project.open(Home(Path(self.home).absolute()))
