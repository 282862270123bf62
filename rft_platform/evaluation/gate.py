"""The gate before promotion: is the candidate good enough to become champion?"""

import math
from dataclasses import dataclass

from rft_platform.errors import UserError
from rft_platform.evaluation.results import EvaluationResult


@dataclass(frozen=True, slots=True)
class GateDecision:
    """Whether a candidate passed, and why or why not in one line."""

    passed: bool
    reason: str


def gate(
    candidate: EvaluationResult,
    champion: EvaluationResult | None,
    *,
    metric: str = "sampled_pass",
    min_delta: float = 0.0,
    min_value: float | None = None,
) -> GateDecision:
    """Compare two evaluations on the same tasks.

    The candidate passes when ``metric`` is at least ``min_value`` and, where there is a champion, at least the
    champion's plus ``min_delta``. Raises ``UserError`` when the candidate was not measured by ``metric`` at all.
    """
    value = _measured(candidate, metric)
    if not math.isfinite(value):
        return GateDecision(False, f"{metric} is {value}")
    if min_value is not None and value < min_value:
        return GateDecision(False, f"{metric} {value:.4f} is below the required {min_value:.4f}")
    if champion is None:
        return GateDecision(True, f"{metric} {value:.4f}; there is no champion yet")
    if champion.tasks_digest != candidate.tasks_digest:
        return GateDecision(
            False,
            f"the champion (policy version {champion.policy_version}) was measured on other tasks: evaluate it again",
        )
    against = _measured(champion, metric)
    needed = against + min_delta
    comparison = f"{metric} {value:.4f} against the champion's {against:.4f} (policy version {champion.policy_version})"
    if value >= needed:
        return GateDecision(True, comparison)
    return GateDecision(False, f"{comparison}: needs {needed:.4f}")


def _measured(result: EvaluationResult, metric: str) -> float:
    value = result.value(metric)
    if value is None:
        known = ", ".join(sorted([*result.summary(), *result.metrics]))
        raise UserError(f"evaluation.gate.metric {metric!r} was not measured; set it to one of: {known}")
    return value
