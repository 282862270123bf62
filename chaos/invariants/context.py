"""The input of an invariant: a finished project, and the same project undisturbed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rft_platform.config.home import Home
from rft_platform.rounds.project.project import Project

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of an invariant."""

    message: str
    round: int | None = None  # None: it does not belong to one round


#: A check of one property; it yields nothing if the property holds.
Invariant = Callable[["Context"], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Context:
    """A finished scratch project and the reference for comparison."""

    project: Project
    rounds: int  # budget
    reference: Project | None = None  # the same configuration, undisturbed; None: nothing is compared with it
    facts: dict[str, float] = field(default_factory=dict)  # measurements of the invariants

    @property
    def home(self) -> Home:
        """The project's folder."""
        return self.project.home

    @property
    def numbers(self) -> range:
        """The numbers of the rounds, from 1."""
        return range(1, self.rounds + 1)

    def registry(self) -> "ModelRegistry":
        """The project's model registry, read from its file, because no server runs."""
        from rft_platform.rounds.setup.connections import connect_registry

        return connect_registry(self.project, f"sqlite:///{self.home.mlflow / 'mlflow.db'}")
