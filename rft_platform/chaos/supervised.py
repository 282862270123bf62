"""The protocol of the supervisor that runs a scratch project during its kills and restarts ended processes."""

from typing import Protocol

from rft_platform.chaos.io_faults import IoFaults
from rft_platform.chaos.records import Ended
from rft_platform.chaos.schedule import Mode
from rft_platform.config.home import Home


class Supervisor(Protocol):
    """A way to run a project: by `rft run`, or by webserver, daemon and MLflow server."""

    mode: Mode
    home: Home
    ended: list[Ended]  # processes that ended by themselves, with their output
    expected: set[int]  # process ids of victims, whose end is not reported

    def start(self, rounds: int) -> None:
        """Start the project with a budget of ``rounds``, or raise its budget."""

    def tend(self) -> None:
        """Restart ended processes; called several times a second."""

    def finished(self) -> bool:
        """Whether every round of the budget is done."""

    def io_faults(self) -> IoFaults | None:
        """The file system faults injected into its processes, if any."""

    def serves(self, role: str) -> bool:
        """Whether the process of this role works again; True for processes that others start."""

    def stop(self) -> None:
        """End the processes that it started, in order."""
