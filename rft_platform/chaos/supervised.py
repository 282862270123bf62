"""What drives a scratch project while it is killed at, and starts again what died, as a supervisor would."""

from typing import Protocol

from rft_platform.chaos.io_faults import IoFaults
from rft_platform.chaos.records import Ended
from rft_platform.chaos.schedule import Mode
from rft_platform.config.home import Home


class Supervisor(Protocol):
    """One way to drive a project: by `rft run`, or by webserver, daemon and MLflow server."""

    mode: Mode
    home: Home
    ended: list[Ended]  # what ended by itself, with what it said
    expected: set[int]  # process ids of victims: their end is no news

    def start(self, rounds: int) -> None:
        """Begin the project with a budget of ``rounds``, or raise its budget."""

    def tend(self) -> None:
        """Start again what has died; called several times a second."""

    def finished(self) -> bool:
        """Whether every round of the budget is done."""

    def io_faults(self) -> IoFaults | None:
        """The file system faults that its processes are started with, if any."""

    def serves(self, role: str) -> bool:
        """Whether the process of this role does its work again; True for those that others start."""

    def stop(self) -> None:
        """End what was started here, in order."""
