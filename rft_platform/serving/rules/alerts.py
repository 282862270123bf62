"""Alerts on production traffic: figures of the newest traffic compared with configured limits."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rft_platform.serving.rules.action_types import QUESTION, TOOL_INVALID

ALERT, ALERT_ENDED = "alert", "alert_ended"  #: kinds of events; their detail ``limit`` names the exceeded limit
RESUMED = "training_resumed"  #: kind of the event by which a user ends the pause of the alerts that are open then

#: What to do if the gate refuses one version after another.
AFTER_REFUSALS = (
    "lower algorithm.optimizer.lr, train on more rows a round (synchronizer.sync_interval), or let smaller gains pass "
    "(evaluation.gate)"
)


@dataclass(frozen=True, slots=True)
class ActionFigures:
    """The calls of one action."""

    calls: int
    rewarded: int  # calls with a reward
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """Figures of the calls that were recorded in a time window. None: there was nothing to measure."""

    actions: Mapping[str, ActionFigures] = field(default_factory=dict)
    calls: int = 0
    labelled: int = 0
    label_delay_s: tuple[float, float] | None = None  # from the answer to its last reward: median and 95th percentile
    served_delay_s: tuple[float, float] | None = None  # from a reward until weights trained on it answer

    @property
    def label_rate(self) -> float | None:
        """Share of the calls with a reward."""
        return self.labelled / self.calls if self.calls else None

    def rate(self, action: str) -> float | None:
        """Share of the calls with this action."""
        return self.actions[action].calls / self.calls if action in self.actions else 0.0 if self.calls else None

    def reward(self, action: str) -> float | None:
        """Mean reward of this action."""
        return self.actions[action].mean_reward if action in self.actions else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the figures; None: no alert."""

    least_calls: int = 50
    invalid_rate: float | None = None
    invalid_reward: float | None = None
    question_rate: float | None = None
    label_rate: float | None = None  # the only lower limit
    label_delay_s: float | None = None
    served_delay_s: float | None = None
    refused_in_a_row: int | None = None  # does not depend on the number of calls


def alerts_of(figures: TrafficFigures, limits: Limits, refused_in_a_row: int = 0) -> dict[str, str]:
    """The exceeded limits by name, each with a message; while there are too few calls, only that of refused versions.

    ``refused_in_a_row``: newest versions that the gate of the evaluation refused, or that were withdrawn later.
    """
    refusals = _above("versions refused in a row", refused_in_a_row, limits.refused_in_a_row)
    found = {"refused_in_a_row": f"{refusals}; {AFTER_REFUSALS}" if refusals else ""}
    if figures.calls >= limits.least_calls:
        found |= dict(_exceeded(figures, limits))
    return {name: text for name, text in found.items() if text}


def open_alerts(events: Iterable[tuple[str, str | None, str]], *, pausing: bool) -> dict[str, str]:
    """The messages of alerts that have begun and not ended, by the name of their limit.

    ``events`` are (kind, limit, message), oldest first. ``pausing``: only alerts after which no user has resumed the
    training.
    """
    found: dict[str, str] = {}
    for kind, limit, message in events:
        if kind == ALERT and limit is not None:
            found[limit] = message
        elif kind == ALERT_ENDED and limit is not None:
            found.pop(limit, None)
        elif kind == RESUMED and pausing:
            found.clear()
    return found


def _exceeded(figures: TrafficFigures, limits: Limits) -> Iterator[tuple[str, str]]:
    invalid, reward = figures.rate(TOOL_INVALID), figures.reward(TOOL_INVALID)
    yield "invalid_rate", _above("invalid tool calls", invalid, limits.invalid_rate, percent=True)
    yield "invalid_reward", _above("mean reward of invalid tool calls", reward, limits.invalid_reward)
    questions = figures.rate(QUESTION)
    yield "question_rate", _above("answers that are questions", questions, limits.question_rate, percent=True)
    if figures.label_rate is not None and limits.label_rate is not None and figures.label_rate < limits.label_rate:
        yield "label_rate", f"calls with a reward: {figures.label_rate:.1%}, the limit is {limits.label_rate:.1%}"
    for name, found, limit in (
        ("label_delay_s", figures.label_delay_s, limits.label_delay_s),
        ("served_delay_s", figures.served_delay_s, limits.served_delay_s),
    ):
        what = "seconds to a reward (p95)" if name == "label_delay_s" else "seconds from a reward to new weights (p95)"
        yield name, _above(what, None if found is None else found[1], limit)


def _above(what: str, value: float | None, limit: float | None, *, percent: bool = False) -> str:
    if value is None or limit is None or value <= limit:
        return ""
    shown = (f"{value:.1%}", f"{limit:.1%}") if percent else (f"{value:,.3g}", f"{limit:,.3g}")
    return f"{what}: {shown[0]}, the limit is {shown[1]}"
