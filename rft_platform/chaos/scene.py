"""What an invariant looks at: a project that has come to its end, and the same project undisturbed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rft_platform.config.home import Home
from rft_platform.rounds.project import Project

if TYPE_CHECKING:
    from rft_platform.registry.models import ModelRegistry


@dataclass(frozen=True, slots=True)
class Broken:
    """One way in which an invariant does not hold."""

    message: str
    round: int | None = None  # None: it is not about one round


#: A check of one property; it yields nothing where the property holds.
Invariant = Callable[["Scene"], Iterator[Broken]]


@dataclass(frozen=True, slots=True)
class Scene:
    """A finished scratch project and what it is compared with."""

    project: Project
    rounds: int  # of the budget
    reference: Project | None = None  # the same configuration, undisturbed; None: weights are not compared
    facts: dict[str, float] = field(default_factory=dict)  # numbers that the invariants found on the way

    @property
    def home(self) -> Home:
        """The project's folder."""
        return self.project.home

    @property
    def numbers(self) -> range:
        """The rounds, from 1."""
        return range(1, self.rounds + 1)

    def registry(self) -> "ModelRegistry":
        """The project's registry, read from its file: no server runs any more."""
        from rft_platform.rounds.processes import connect_registry

        return connect_registry(self.project, f"sqlite:///{self.home.mlflow / 'mlflow.db'}")
