"""Audit of rewards: what may be wrong with the rewards of a project, found in the figures of its rounds.

``run_signals`` measures a round when it is judged; its figures are part of the round's record. ``audit`` and
``audit_held_out`` compare the newest rounds with the first ones. They describe what has happened: a failed audit is a
reason to read transcripts, and a passed one proves nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.schema.evaluation import PAIRED_METRICS
from rft_platform.evaluation.comparison import compare
from rft_platform.evaluation.results import EvaluationResult
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.experience.store import ExperienceStore
from rft_platform.judging.execution.judge_rollouts import TasksetJudge
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, read
from rft_platform.rounds.reporting.round_history import evaluation_of

WINDOW = 3  #: Rounds whose mean is compared: single rounds differ by their tasks.
READ = 10  #: Rounds read at each end of the history: some may lack a figure.
#: One part decides alone if it explains this share of the variance of the reward: the rest is below the usual noise.
DOMINANT_SHARE = 0.9
LENGTH_FACTOR = 2.0  #: Growth or decline of the tokens of a run; a slower drift is common when a model learns.
#: Share of groups with equal rewards: only one group in five gives a gradient, at five times the cost per group.
EQUAL_GROUPS = 0.8
TOOL_CALL_FACTOR = 0.5  #: Decline of the share of runs that call a tool.
LEAST_TOOL_CALLS = 0.05  #: Below this share at the start, a decline to half is a matter of a few runs.
#: Gain of the training reward, as a share of the range of the rewards, which the held-out result should follow.
REWARD_GAIN = 0.05
HELD_OUT_DISTANCE = 5  #: Rounds between the two evaluations that are compared.


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """What the audit reads of a judged round. None: not measured."""

    round: int
    mean_reward: float | None = None
    reward_range: float | None = None  # largest minus smallest reward of a run
    part_shares: Mapping[str, float] = field(default_factory=dict)  # of the variance of the reward, by part
    run_tokens: float | None = None  # sampled tokens of a run
    equal_groups: float | None = None  # share of groups whose runs all have the same reward
    tool_call_rate: float | None = None  # share of runs that call a tool


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one audit."""

    name: str  # of the asset check
    passed: bool
    text: str
    figures: dict[str, float] = field(default_factory=dict)  # what was compared, with the limit


def run_signals(
    rows: Sequence[RolloutRow], judged: Sequence[JudgedRow], judges: Mapping[str, TasksetJudge]
) -> dict[str, Any]:
    """Figures of the default policy's runs for the record of a round. ``rows`` and ``judged`` are in the same order."""
    tokens, calls, runs = dict[str, int](), dict[str, bool](), dict[str, tuple[str, JudgedRow]]()
    for row, one in zip(rows, judged, strict=True):
        if row.call.policy == DEFAULT_POLICY:
            tokens[row.run_id] = tokens.get(row.run_id, 0) + len(row.call.response_ids)
            calls[row.run_id] = calls.get(row.run_id, False) or bool(row.call.response.get("tool_calls"))
            runs[row.run_id] = row.taskset, one
    if not runs:
        return {}
    found = {"run_tokens": fmean(tokens.values()), "tool_call_rate": fmean(calls.values())}
    shares = part_shares([_contributions(one, judges.get(taskset)) for taskset, one in runs.values()])
    return {**found, "part_shares": shares} if shares else found


def _contributions(judged: JudgedRow, judge: TasksetJudge | None) -> dict[str, float]:
    """What each part of a weighted judge adds to the reward of a run; empty for any other judge."""
    parts = judge.spec.parts if judge is not None and judge.spec is not None else ()
    if len(parts) < 2:
        return {}
    return {part.name: part.weight * judged.reward_parts.get(part.name, 0.0) for part in parts}


def part_shares(contributions: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The share of each part in the variance of its sum: cov(part, sum) / var(sum). The shares add up to 1.

    Empty if no run has parts, or if the sums do not differ.
    """
    runs = [each for each in contributions if each]
    names = sorted({name for each in runs for name in each})
    sums = [sum(each.values()) for each in runs]
    middle = fmean(sums) if sums else 0.0
    variance = sum((each - middle) ** 2 for each in sums)
    if variance <= 1e-12:
        return {}
    return {
        name: sum(run.get(name, 0.0) * (total - middle) for run, total in zip(runs, sums, strict=True)) / variance
        for name in names
    }


def figures_of(store: ExperienceStore, rounds: Iterable[int]) -> list[RoundFigures]:
    """The figures of the judged rounds among ``rounds``."""
    judged = [(number, found) for number in rounds if (found := read(store, number).judged) is not None]
    return [_figures(number, found) for number, found in judged]


def _figures(number: int, judged: Judged) -> RoundFigures:
    known = judged.figures
    most, least = known.get("max_reward"), known.get("min_reward")
    return RoundFigures(
        number,
        judged.mean_reward,
        None if most is None or least is None else most - least,
        known.get("part_shares", {}),
        known.get("run_tokens"),
        known.get("equal_groups"),
        known.get("tool_call_rate"),
    )


def audit_round(store: ExperienceStore, number: int) -> list[Finding]:
    """Audit the rounds up to ``number``; reads the records of the first and of the newest rounds only."""
    rounds = [each for each in store.rounds() if 1 <= each <= number]
    compared = rounds if len(rounds) <= 2 * READ else [*rounds[:READ], *rounds[-READ:]]
    return audit(figures_of(store, compared))


def audit(history: Sequence[RoundFigures]) -> list[Finding]:
    """Audit the parts of the reward, the length of runs, the groups and the tool calls, oldest round first."""
    return [_parts(history), _length(history), _groups(history), _tool_calls(history)]


def _parts(history: Sequence[RoundFigures]) -> Finding:
    known = [(each.round, each.part_shares) for each in history[-READ:] if each.part_shares][-WINDOW:]
    if len(known) < WINDOW:
        return Finding("audit_parts", True, f"fewer than {WINDOW} of the newest rounds have rewards of several parts")
    names = sorted(set().union(*(shares for _, shares in known)))
    means = {name: fmean(shares.get(name, 0.0) for _, shares in known) for name in names}
    name, share = max(means.items(), key=lambda item: item[1])
    figures = {**{f"share of {part}": value for part, value in means.items()}, "limit": DOMINANT_SHARE}
    text = f"part {name} explains {share:.0%} of the variance of the reward{_during(known)}"
    return Finding("audit_parts", share < DOMINANT_SHARE, text, figures)


def _length(history: Sequence[RoundFigures]) -> Finding:
    def judge(first: float, last: float) -> tuple[bool, str]:
        factor = last / first if first else 1.0
        return 1 / LENGTH_FACTOR < factor < LENGTH_FACTOR, f"runs have {last:.1f} tokens, {first:.1f} at first"

    return _change("audit_length", history, lambda each: each.run_tokens, judge, LENGTH_FACTOR)


def _groups(history: Sequence[RoundFigures]) -> Finding:
    def judge(first: float, last: float) -> tuple[bool, str]:
        return last < EQUAL_GROUPS, f"{last:.0%} of the groups have equal rewards, {first:.0%} at first"

    return _change("audit_groups", history, lambda each: each.equal_groups, judge, EQUAL_GROUPS)


def _tool_calls(history: Sequence[RoundFigures]) -> Finding:
    def judge(first: float, last: float) -> tuple[bool, str]:
        kept = first < LEAST_TOOL_CALLS or last > TOOL_CALL_FACTOR * first
        return kept, f"{last:.1%} of the runs call a tool, {first:.1%} at first"

    return _change("audit_tool_calls", history, lambda each: each.tool_call_rate, judge, TOOL_CALL_FACTOR)


def _change(
    name: str,
    history: Sequence[RoundFigures],
    figure: Callable[[RoundFigures], float | None],
    judge: Callable[[float, float], tuple[bool, str]],
    limit: float,
) -> Finding:
    """Compare the mean of a figure over the first rounds that have it with that over the newest; none is in both."""
    known = [(each.round, value) for each in history if (value := figure(each)) is not None]
    if len(known) < 2 * WINDOW:
        return Finding(name, True, f"compared from {2 * WINDOW} measured rounds on")
    first, last = (fmean(value for _, value in part) for part in (known[:WINDOW], known[-WINDOW:]))
    passed, text = judge(first, last)
    return Finding(name, passed, f"{text}{_during(known[-WINDOW:])}", {"first": first, "newest": last, "limit": limit})


def _during(known: Sequence[tuple[int, Any]]) -> str:
    return f" (rounds {known[0][0]} to {known[-1][0]})"


def audit_evaluation(project: Project, number: int) -> Finding:
    """Audit whether the held-out result of a round follows the training reward, since an earlier evaluation."""
    store, result = project.store, evaluation_of(project.store, number)
    numbers = [each for each in reversed(store.rounds()) if WINDOW <= each <= number - HELD_OUT_DISTANCE]
    gate = project.config.evaluation.gate.metric
    for earlier in numbers if result is not None else ():
        known = evaluation_of(store, earlier)
        if known is not None and result is not None:
            before, now = (figures_of(store, range(last - WINDOW + 1, last + 1)) for last in (earlier, number))
            return audit_held_out(before, now, known, result, gate if gate in PAIRED_METRICS else "mean_reward")
    return Finding("audit_held_out", True, f"compared with an evaluation {HELD_OUT_DISTANCE} rounds before; none yet")


def audit_held_out(
    before: Sequence[RoundFigures],
    now: Sequence[RoundFigures],
    earlier: EvaluationResult,
    result: EvaluationResult,
    metric: str,
) -> Finding:
    """Compare the gain of the training reward between two windows with that of the held-out ``metric``."""
    found = compare(result, earlier, metric, "previous")
    rewards = [[each.mean_reward for each in part if each.mean_reward is not None] for part in (before, now)]
    spread = max((each.reward_range for each in (*before, *now) if each.reward_range is not None), default=0.0)
    if found is None or not all(rewards) or spread <= 0:
        return Finding(
            "audit_held_out", True, "the two evaluations, or the rewards of their rounds, are not comparable"
        )
    gain = fmean(rewards[1]) - fmean(rewards[0])
    figures = {
        "training_gain": gain,
        "held_out_gain": found.difference,
        "held_out_low": found.low,
        "held_out_high": found.high,
        "limit": REWARD_GAIN * spread,
    }
    text = (
        f"the training reward changed by {gain:+.3f}, {metric} on the held-out tasks by "
        f"{found.difference:+.3f} (round {earlier.round} to {result.round})"
    )
    return Finding("audit_held_out", gain < REWARD_GAIN * spread or found.difference > 0, text, figures)
