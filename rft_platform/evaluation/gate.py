"""The promotion gate: decides whether a candidate is good enough to become champion."""

import math
from dataclasses import dataclass
from statistics import fmean

from rft_platform.common.errors import UserError
from rft_platform.config.schema.evaluation import PAIRED_METRICS, Gate, Regression
from rft_platform.evaluation.comparison import Comparison, compare, paired_scores
from rft_platform.evaluation.results import EvaluationResult, measured_alike

_OTHERWISE = "by another judge, workflow or sampling (or another version of the platform)"
_COUNTS = ("failed_runs", "truncated_share")  # in the summary of a result, and no scores: more is not better
_MORE_FAILED = 0.05  # share of runs that may fail beyond the champion's share; scores leave out failed runs


@dataclass(frozen=True, slots=True)
class GateDecision:
    """Whether a candidate passed, with the reason in one line: ``reason`` has all figures, ``summary`` is short."""

    passed: bool
    reason: str
    summary: str = ""  # as in ``+0.7 points, not clearly better than v34``; empty: ``reason`` is short itself


@dataclass(frozen=True, slots=True)
class RegressionResult:
    """Whether a candidate kept the scores of the start on the regression set."""

    taskset: str
    decision: GateDecision
    compared: Comparison | None  # None: the start has no comparable result

    def figures(self) -> dict[str, float]:
        """The difference from the start with names for plots."""
        if self.compared is None:
            return {}
        name = f"regression/{self.taskset}/{self.compared.metric}"
        return {
            name: self.compared.difference,
            f"{name}_low": self.compared.low,
            f"{name}_high": self.compared.high,
        }


def compare_with_start(
    candidate: EvaluationResult, start: EvaluationResult | None, settings: Regression
) -> RegressionResult:
    """Compare the results of a candidate and of the start on the regression set, by the rules of ``gate``.

    The candidate fails if it may be worse than the start by more than the tolerance.
    """
    name = f"regression set {settings.taskset}"
    if start is None:
        why = f"{name}: the start was not measured on it: evaluate it again (`rft eval --all`)"
        return RegressionResult(settings.taskset, GateDecision(False, why), None)
    found = gate(
        candidate,
        start,
        metric=settings.metric,
        min_delta=-settings.tolerance,
        confident=settings.confident,
        to_beat="start",
    )
    summary = f"{name}: {found.summary}" if found.summary else ""
    compared = compare(candidate, start, settings.metric, "start")
    return RegressionResult(settings.taskset, GateDecision(found.passed, f"{name}: {found.reason}", summary), compared)


def gate(
    candidate: EvaluationResult,
    champion: EvaluationResult | None,
    *,
    metric: str = "sampled_pass",
    min_delta: float = 0.0,
    min_value: float | None = None,
    confident: bool = True,
    to_beat: str = "champion",
) -> GateDecision:
    """Compare two evaluations on the same tasks, with the same judge, workflow and sampling.

    The candidate passes if ``metric`` is at least ``min_value`` and, if there is a champion, better than the
    champion's. With ``confident``, the lower end of the difference's 95 % interval must exceed ``min_delta``. Without
    ``confident``, the difference must be at least ``min_delta``, and positive if ``min_delta`` is 0. By a metric of
    ``PAIRED_METRICS`` the difference is that on the tasks for which both have scores.

    ``to_beat`` is the name of ``champion`` in the reason. Before the first promotion ``champion`` is the evaluation of
    the start and ``to_beat`` is ``start``: without ``confident`` and with ``min_delta`` 0, a difference of 0 then
    passes. A candidate of which clearly more runs failed does not pass: its scores would be those of the tasks that it
    can do. Raises ``UserError`` if the candidate was not measured by ``metric``.
    """
    if champion is not None and _failed(candidate) > _failed(champion) + _MORE_FAILED:
        theirs = f"{_failed(champion):.1%} of the {to_beat}'s (policy version {champion.policy_version})"
        return GateDecision(False, f"{_failed(candidate):.1%} of its runs failed, {theirs}: failed runs have no score")
    value = _measured(candidate, metric)
    if not math.isfinite(value):
        return GateDecision(False, f"{metric} is {value}")
    if min_value is not None and value < min_value:
        return GateDecision(False, f"{metric} {value:.4f} is below the required {min_value:.4f}")
    if champion is None:
        is_start = candidate.round == 0
        why = "this is the start" if is_start else "there is no champion yet, and the start was not evaluated"
        return GateDecision(True, f"{metric} {value:.4f}; {why}")
    if not measured_alike(candidate, champion):
        other = "on other tasks" if champion.tasks_digest != candidate.tasks_digest else _OTHERWISE
        return GateDecision(
            False,
            f"the {to_beat} (policy version {champion.policy_version}) was measured {other}: evaluate it again "
            "(`rft eval --all`)",
        )
    against = _measured(champion, metric)
    found = compare(candidate, champion, metric, to_beat) if metric in PAIRED_METRICS else None
    if found is not None:  # a failed run leaves its task without a score in one of them
        value, against = map(fmean, paired_scores(candidate, champion, metric))
    elif metric in PAIRED_METRICS:
        return GateDecision(False, f"no task has a score by {metric} in this evaluation and in the {to_beat}'s")
    on = f" on the {found.tasks} tasks that both have" if found and found.tasks < candidate.tasks else ""
    known = f"{metric} {value:.4f} against the {to_beat}'s {against:.4f}{on} (policy version {champion.policy_version})"
    if confident:
        return _confident(found, metric, min_delta, known)
    needed = against + min_delta
    passed = value > against if min_delta == 0 and to_beat == "champion" else value >= needed
    if passed:
        return GateDecision(True, known)
    why = f"{known}: needs {needed:.4f}" if min_delta or to_beat != "champion" else f"{known}: no gain"
    return GateDecision(False, why, _summary(value - against, min_delta, metric, champion.policy_version, clearly=""))


def _failed(result: EvaluationResult) -> float:
    """The share of failed runs, over all modes."""
    scored = sum(len(runs) for table in result.scores.values() for runs in table.values())
    return result.failed_runs / max(result.failed_runs + scored, 1)


def _confident(found: Comparison | None, metric: str, min_delta: float, known: str) -> GateDecision:
    if found is None:
        raise UserError(
            f"evaluation.gate.confident compares task by task, and {metric} has no score of each task: set "
            f"evaluation.gate.metric to one of {', '.join(PAIRED_METRICS)}"
        )
    reason = f"{known}, difference {found.difference:+.4f} (95 % {found.low:+.4f} to {found.high:+.4f})"
    if found.low > min_delta:
        return GateDecision(True, reason)
    short = _summary(found.difference, min_delta, metric, found.policy_version, clearly="clearly ")
    return GateDecision(False, f"{reason}: its lower end must exceed {min_delta:+.4f}", short)


def _summary(difference: float, min_delta: float, metric: str, version: int, *, clearly: str) -> str:
    """Why a difference from policy ``version`` is not enough, in a few words; ``clearly`` or nothing qualifies it."""
    gain = _points(difference, metric)
    if min_delta < 0:
        return f"{gain}, perhaps more than {_points(-min_delta, metric).lstrip('+')} worse than v{version}"
    if difference <= 0:
        return f"{gain}, not better than v{version}"
    enough = f"{_points(min_delta, metric)} " if min_delta else ""
    return f"{gain}, not {clearly}{enough}better than v{version}"


def _points(difference: float, metric: str) -> str:
    """A difference of pass rates in percentage points, of other metrics as it is."""
    return f"{100 * difference:+.1f} points" if metric.endswith("_pass") else f"{difference:+.4g}"


def promotion_rule(settings: Gate, regression: Regression | None = None, *, first: bool = False) -> str:
    """The rule of ``evaluation`` in one sentence, for people who see a version that is not the champion.

    ``first``: there is no champion yet, so a version is compared with the start.
    """
    also = "" if regression is None else f", and {_kept_rule(regression)}"
    to_beat, becomes = ("start", "the first champion") if first else ("champion", "champion")
    gain = f"the gain over the {to_beat} in {settings.metric}"
    limit = _points(settings.min_delta, settings.metric) if settings.min_delta else "0"
    if bool(settings.confident) if first else settings.needs_interval:
        return f"a version becomes {becomes} if the 95 % interval of {gain} lies above {limit}{also}"
    above = "at least" if settings.min_delta or first else "above"
    return f"a version becomes {becomes} if {gain} is {above} {limit}{also}"


def _kept_rule(settings: Regression) -> str:
    limit, on = _points(-settings.tolerance, settings.metric), f"regression set {settings.taskset}"
    difference = f"the difference from the start in {settings.metric} on the {on}"
    if settings.confident:
        return f"the 95 % interval of {difference} lies above {limit}"
    return f"{difference} is at least {limit}"


def _measured(result: EvaluationResult, metric: str) -> float:
    value = None if metric in _COUNTS else result.value(metric)
    if value is None:
        known = ", ".join(sorted({*result.summary(), *result.metrics}.difference(_COUNTS)))
        raise UserError(f"evaluation.gate.metric {metric!r} was not measured; set it to one of: {known}")
    return value
