"""Production traffic as the stages of an online project's rounds see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rft_platform.experience.record import RolloutRow
    from rft_platform.model_registry.run_traces import GivenFeedback
    from rft_platform.rounds.project.record import Demonstrations, Policy


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """Numbers of committed rows that the next round would take, and of those that it would leave out."""

    rows: int
    above_share: int


@dataclass(frozen=True, slots=True)
class TakenRows:
    """The rows of one round, and the number of people whose calls they hold."""

    rows: "list[RolloutRow]"
    subjects: int


class TrafficSource(Protocol):
    """What rounds take from production traffic, and what was decided there about their versions.

    ``online.source`` implements it over the online service's database.
    """

    def waiting(self) -> WaitingRows:
        """The committed rows that no round has taken."""

    def training_pause(self) -> str | None:
        """Why alerts pause the training; None: they do not."""

    def take(self, round_number: int) -> TakenRows:
        """Record once which rows a round takes, and return them; a repeated call returns the same rows.

        Raises StorageError if no row is committed, or if another home has stored the rows of this round.
        """

    def consume(self, round_number: int) -> None:
        """Mark the rows of a round as stored."""

    def demonstrations(self, round_number: int) -> "Demonstrations":
        """Write the corrections that no earlier round took to the round's folder; a lost file is written again."""

    def experts(self, round_number: int, model_folder: Path) -> Path | None:
        """Write the corrections of all rounds up to this one for its training; None if there are none."""

    def feedback_on(self, msg_ids: Sequence[str]) -> "Mapping[str, list[GivenFeedback]]":
        """The feedback of users on these answers, by answer."""

    def served_version(self) -> int | None:
        """The project's own version that a decision chose to serve; None: none did, or an imported version serves."""

    def policies_in_release(self) -> "list[Policy]":
        """Both versions of a running canary or A/B test, and the version that a roll-back would serve."""

    def verdicts(self) -> Mapping[int, str | None]:
        """What withdrew each decided version, for example "canary 3"; None for a version that was chosen to serve."""
