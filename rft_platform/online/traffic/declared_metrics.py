"""Declared metrics of feedback. Clients check values before sending, and the service checks them before storing."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rft_platform.common.errors import UserError
from rft_platform.config.schema.reward_formula import REWARD as REWARD

SUCCESS = 0.5  #: a run with at least this reward is successful
#: Metric of an answer whose reaction shows no opinion, and value of the tag ``source`` of a reward from a reaction.
IMPLICIT = "implicit"
IMPLICIT_ID = f"{IMPLICIT}-"  #: prefix of the ids of feedback from reactions; clients may use neither prefix nor metric
_LONGEST_ID = 200  # characters, as in the database


class MetricError(UserError):
    """A feedback has a metric that is not declared, or a value that the metric does not allow."""

    def __init__(self, metric: str, message: str) -> None:
        super().__init__(message)
        self.metric = metric


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its valid values. Feedback with a metric of level ``call`` must name the answer that it rates."""

    name: str
    level: Literal["run", "call"] = "run"
    type: Literal["float", "boolean"] = "float"
    min: float | None = None
    max: float | None = None

    def number(self, value: float) -> float:
        """The value as the service stores it; raises MetricError for a value that the metric does not allow."""
        low, high = (0.0, 1.0) if self.type == "boolean" else (self.min, self.max)
        if not math.isfinite(value) or (self.type == "boolean" and value not in (0, 1)):
            raise MetricError(self.name, f"metric {self.name}: {value!r} is no {self.type}")
        if (low is not None and value < low) or (high is not None and value > high):
            limits = f"above {high}" if low is None else f"below {low}" if high is None else f"outside {low} to {high}"
            raise MetricError(self.name, f"metric {self.name}: {value!r} is {limits} (service.metrics)")
        return float(value)


#: The reward of a service that declares no other bounds. Advantages are relative to a round's other rewards, so a
#: single reward of 1e6 would take their part in the training.
BOUNDED_REWARD = Metric(REWARD, min=0.0, max=1.0)


class DeclaredMetrics:
    """The metrics that a feedback may have; the reward is always among them."""

    def __init__(self, metrics: Iterable[Metric] = (), reward: Metric | None = None, *, others: bool = False) -> None:
        """``reward`` holds if ``metrics`` has no reward; None: any finite reward. ``others``: accept other metrics."""
        self._metrics = {REWARD: reward or Metric(REWARD)} | {metric.name: metric for metric in metrics}
        self._others = others

    @classmethod
    def of_service(cls, metrics: Iterable[Metric] = ()) -> "DeclaredMetrics":
        """The metrics of a service whose configuration declares ``metrics``; without a further metric it takes any."""
        declared = list(metrics)
        return cls(declared, BOUNDED_REWARD, others=all(metric.name == REWARD for metric in declared))

    def numbers(self, values: Mapping[str, float], *, names_answers: bool) -> dict[str, float]:
        """The values of a feedback as they are stored; raises MetricError for the first value that is not allowed.

        ``names_answers``: the feedback names the answers that it rates, and not only a run or a conversation.
        """
        return {name: self._number(name, value, names_answers) for name, value in values.items()}

    def _number(self, name: str, value: float, names_answers: bool) -> float:
        metric = self._metrics.get(name) or (Metric(name) if self._others else None)
        if metric is None:
            known = ", ".join(sorted(self._metrics))
            raise MetricError(name, f"metric {name!r} is not declared: expected one of {known}")
        if metric.level == "call" and not names_answers:
            raise MetricError(name, f"metric {name} is of level call: name the answers that it rates")
        return metric.number(value)


def further_id(feedback_id: str, metric: str) -> str:
    """The id under which a further metric of one feedback is stored; the first metric has the feedback's own id."""
    name = f"{feedback_id}:{metric}"
    return name if len(name) <= _LONGEST_ID else hashlib.sha256(name.encode()).hexdigest()
