"""Open a project together with its production traffic. The database of the traffic is imported at the first use."""

from functools import cached_property
from typing import TYPE_CHECKING

from rft_platform.config.home import Home
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.rounds.project.project import Project

if TYPE_CHECKING:
    from rft_platform.online.source import ProductionTraffic


class OnlineProject(Project):
    """A project that reaches its production traffic, if its configuration says that it has some."""

    @cached_property
    def traffic(self) -> "ProductionTraffic | None":
        """The production traffic of an online project; None for a project that explores tasks."""
        if not self.config.online:
            return None
        from rft_platform.online.source import ProductionTraffic

        return ProductionTraffic(self)


def open_project(home: Home) -> Project:
    """The project that was started in ``home``. Raises UserError if there is none."""
    return OnlineProject.open(home)


def project_in(home: Home, config: RftConfig) -> Project:
    """A project in ``home`` with a configuration that is not in force there yet."""
    return OnlineProject(home, config)
