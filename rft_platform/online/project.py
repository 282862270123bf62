"""Open a project together with its production traffic. The database of the traffic is imported at the first use."""

from typing import TYPE_CHECKING

from rft_platform.config.home import Home
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.rounds.project.project import Project

if TYPE_CHECKING:
    from rft_platform.online.source import ProductionTraffic


def open_project(home: Home) -> Project:
    """The project that was started in ``home``. Raises UserError if there is none."""
    return Project.open(home, traffic_of)


def project_in(home: Home, config: RftConfig) -> Project:
    """A project in ``home`` with a configuration that is not in force there yet."""
    return Project(home, config, traffic_of)


def traffic_of(project: Project) -> "ProductionTraffic":
    """The production traffic of an online project."""
    from rft_platform.online.source import ProductionTraffic

    return ProductionTraffic(project)
