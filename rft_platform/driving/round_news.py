"""One line per completed round, which shows the user how the model improves."""

from typing import TYPE_CHECKING

from rft_platform.driving.round_lines import RoundLine, round_line
from rft_platform.experience.rounds import round_key

if TYPE_CHECKING:
    from rft_platform.rounds.project import Project


class RoundNews:
    """Returns, at each call, a line for each round completed since the previous call."""

    def __init__(self, project: "Project") -> None:
        self._project = project
        self._next = 0
        self()  # skip the rounds that are complete already

    def __call__(self) -> list[str]:
        """The lines of newly completed rounds, in order."""
        lines = []
        while self._project.store.read_note(self._next, "evaluation") is not None:
            lines.append(describe_round(round_line(self._project, self._next)))
            self._next += 1
        return lines


def describe_round(line: RoundLine) -> str:
    """A round in one line: reward, pass rates, published versions."""
    parts = {
        "reward": _said(line.reward, ".3f"),
        "held-out sampled": _said(line.pass_rate_sampled, ".1%"),
        "greedy": _said(line.pass_rate_greedy, ".1%"),
        "policy": _said(line.policy_version, "d", "v"),
        "model": line.model_version,
    }
    said = "  ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    name = round_key(line.round) if line.round else "start"
    ends = ("champion" if line.champion else None, line.nothing_trained)
    return "  ".join([name, said, *filter(None, ends)])


def _said(value: float | None, form: str, prefix: str = "") -> str | None:
    return None if value is None else f"{prefix}{value:{form}}"
