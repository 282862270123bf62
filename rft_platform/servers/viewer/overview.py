"""The front page of `rft view`: what the rounds achieved, and what they took.

It reads the records of rounds, and rows of the newest judged round only (of the tasks that it shows also those of a few
rounds before), so that its time does not grow with the store. The summary of a round is kept until its record changes.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rft_platform.evaluation.plots import CurvePoint
from rft_platform.experience.queries import connect
from rft_platform.experience.store import ExperienceStore
from rft_platform.online.pages.charts import Chart, Series
from rft_platform.rounds.project.record import (
    Explored,
    Judged,
    Policy,
    RoundEvaluation,
    RoundRecord,
    Trained,
    read,
)
from rft_platform.rounds.reporting.round_history import PARTS, curve_point, time_split
from rft_platform.servers.viewer.page import reward_style
from rft_platform.servers.viewer.queries import dicts, prompt_of

#: The page shows the newest rounds, because each round costs some milliseconds when it is read first.
SHOWN_ROUNDS = 50
_GROUPS = 8
_EARLIER = 10  # rounds in which earlier groups of the shown tasks are looked for ...
_SIDE_BY_SIDE = 3  # ... of which the newest are shown
_VALUES = 12  # more different rewards are counted in ``_BINS`` intervals
_BINS = 20
_STYLES = dict(zip(PARTS, ("series-a", "series-b", "series-c", "series-d"), strict=True))
_DECISIONS = {"kept": "kept the champion"}  # names of decisions in the chart that differ from those in the table
_PARTS = (Explored, Judged, Trained, Policy, RoundEvaluation)

_REWARDS = """
SELECT reward, count(*) FROM (SELECT arg_max(reward, step) AS reward FROM judged GROUP BY run_id)
GROUP BY reward ORDER BY reward
"""
_MIXED = """
SELECT group_id FROM (
    SELECT group_id, run_id, arg_max(reward, step) AS reward FROM judged WHERE isfinite(reward)
    GROUP BY group_id, run_id
)
GROUP BY group_id HAVING count(*) > 1 ORDER BY coalesce(stddev_pop(reward), 0) DESC, group_id LIMIT ?
"""
_TASKS = """
SELECT task_id, arg_min(messages, step) FROM rollouts WHERE list_contains(?, group_id) GROUP BY task_id ORDER BY task_id
"""
_RUNS = """
WITH shown AS (
    SELECT round, task_id, group_id, run_id, max(policy_version) AS version FROM rollouts
    WHERE list_contains(?, task_id) GROUP BY round, task_id, group_id, run_id
), rewards AS (
    SELECT round, run_id, arg_max(reward, step) AS reward FROM judged
    WHERE run_id IN (SELECT run_id FROM shown) GROUP BY round, run_id
)
SELECT s.round, s.task_id, s.group_id, s.run_id, s.version, w.reward
FROM shown s LEFT JOIN rewards w ON w.round = s.round AND w.run_id = s.run_id ORDER BY s.round, s.group_id, s.run_id
"""


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """What the page shows of a round."""

    number: int
    point: CurvePoint | None  # None before the round has published its policy
    decision: str = ""  # of the gate; empty if none was due
    reason: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage
    processor_s: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    judged: int = 0  # rows

    @property
    def style(self) -> str:
        """The class of the decision's colour."""
        return {"promoted": "good", "passed": "series-a", "rolled back": "series-d"}.get(self.decision, "bad")


def summaries(store: ExperienceStore, numbers: Iterable[int]) -> list[RoundSummary]:
    """The summaries of some rounds."""
    return [_summary(store.root, number, _stamp(read(store, number))) for number in numbers]


def _stamp(record: RoundRecord) -> tuple[int, ...]:
    """Changes when a part of the record is written."""
    found = []
    for kind in _PARTS:
        try:
            found.append(os.stat(record.file(kind)).st_mtime_ns)  # noqa: PTH116
        except FileNotFoundError:
            found.append(0)
    return tuple(found)


@lru_cache(maxsize=10_000)
def _summary(root: Path, number: int, _stamp: tuple[int, ...]) -> RoundSummary:
    record = read(ExperienceStore(root), number)
    explored, judged = record.explored or Explored(), record.judged or Judged()
    evaluated, trained = record.evaluated or RoundEvaluation(), record.trained()
    figures = explored.figures
    processor = {
        "rollout": (figures.get("cpu_s") or 0.0) + (figures.get("engine_cpu_s") or 0.0),
        "train": trained.cpu_seconds if trained else 0.0,
        "evaluation": evaluated.metrics.get("evaluation_cpu_s", 0.0),
    }
    tokens = {
        "rollout": int(figures.get("prompt_tokens") or 0) + int(figures.get("completion_tokens") or 0),
        "judge": int(judged.figures.get("judge_tokens") or 0),
        "train": round(trained.metrics.get("tokens", 0.0) * trained.steps) if trained else 0,
        "evaluation": sum(result.completion_tokens for result in evaluated.results),
    }
    return RoundSummary(
        number, curve_point(record, evaluated.metrics), _decision(evaluated) if number else "", _reason(evaluated),
        time_split(record), processor, tokens, judged.rows,
    )  # fmt: skip


def _decision(evaluated: RoundEvaluation) -> str:
    if evaluated.rolled_back_at is not None:
        return "rolled back"
    if evaluated.promoted:
        return "promoted"
    return "" if evaluated.gate_passed is None else "passed" if evaluated.gate_passed else "kept"


def _reason(evaluated: RoundEvaluation) -> str:
    if evaluated.promoted_because:
        return f"promoted by hand: {evaluated.promoted_because}"
    return evaluated.gate


def learning_curve(shown: Sequence[RoundSummary]) -> Chart:
    """Held-out pass rates by round, with a mark for every decision of the gate."""
    trained = [(each, each.point) for each in shown if each.point is not None]
    points = [point for _, point in trained]
    band = [
        None if p.sampled_low is None or p.sampled_high is None else (p.sampled_low, p.sampled_high) for p in points
    ]
    rates = [point.greedy if point.sampled is None else point.sampled for point in points]
    notes = [f"version {point.policy_version}, {each.reason}" for each, point in trained]
    marks = [
        Series(
            _DECISIONS.get(decision, decision), style,
            [rate if each.decision == decision else None for (each, _), rate in zip(trained, rates, strict=True)],
            notes=notes,
        )
        for decision, style in dict.fromkeys((each.decision, each.style) for each, _ in trained if each.decision)
    ]  # fmt: skip
    return Chart(
        "Held-out pass rate by round", "round", [f"r{point.round}" for point in points],
        [Series("sampled", "series-a", [point.sampled for point in points], band),
         Series("greedy", "series-b", [point.greedy for point in points]), *marks], unit="%",
    )  # fmt: skip


def reward_curve(shown: Sequence[RoundSummary]) -> Chart:
    """Mean reward of the training runs by round."""
    points = [each.point for each in shown if each.point is not None and each.number]
    mean = Series("mean reward", "series-a", [point.reward for point in points])
    return Chart("Mean reward by round", "round", [f"r{point.round}" for point in points], [mean], from_zero=False)


@dataclass(frozen=True, slots=True)
class Stage:
    """Share of a stage in the time of the rounds, and what it took in each round on average."""

    name: str
    style: str
    share: float  # in percent
    seconds: float
    processor_s: float
    tokens: float


def stages(shown: Sequence[RoundSummary]) -> tuple[list[Stage], Chart]:
    """The stages of the rounds that have ended, and their seconds by round; empty before the first."""
    ended = [each for each in shown if each.number and len(each.seconds) == len(PARTS)]
    total = sum(sum(each.seconds.values()) for each in ended)
    found: list[Stage] = []
    for name, style in _STYLES.items():
        seconds = sum(each.seconds[name] for each in ended)
        share = round(100 * seconds / total, 1) if total else 0.0
        others = [sum(of.get(name, 0) for of in column) / max(len(ended), 1)
                  for column in ([each.processor_s for each in ended], [each.tokens for each in ended])]  # fmt: skip
        found.append(Stage(name, style, share, seconds / max(len(ended), 1), *others))
    times = [Series(name, style, [each.seconds[name] for each in ended]) for name, style in _STYLES.items()]
    labels = [f"r{each.number}" for each in ended]
    return found if ended else [], Chart("Seconds of each stage by round", "round", labels, times, "s", bars=True)


def histogram(store: ExperienceStore, number: int) -> tuple[Chart, int]:
    """The rewards of a round's runs as bars that link to the runs; and the number of runs without a reward."""
    with connect(store, rounds=[number]) as connection:
        counts = connection.execute(_REWARDS).fetchall()
    known = [(float(reward), int(runs)) for reward, runs in counts if reward is not None and abs(reward) < float("inf")]
    bars = _intervals(known)
    links = [
        "/runs?" + urlencode({"first": number, "last": number, "least": low, "most": high}) for _, low, high, _ in bars
    ]
    runs = Series("runs", [reward_style(high) for _, _, high, _ in bars], [float(count) for *_, count in bars])
    unrewarded = sum(int(count) for _, count in counts) - sum(count for _, count in known)
    texts = [text for text, *_ in bars]
    return Chart(f"Runs of round {number} by reward", "reward", texts, [runs], bars=True, links=links), unrewarded


def _intervals(known: Sequence[tuple[float, int]]) -> list[tuple[str, float, float, int]]:
    """Text, smallest reward, largest reward and runs of each bar."""
    if len(known) <= _VALUES:
        return [(f"{reward:.3g}", reward, reward, runs) for reward, runs in known]
    low, high = known[0][0], known[-1][0]
    width, totals = (high - low) / _BINS, defaultdict[int, int](int)
    for reward, runs in known:
        totals[min(int((reward - low) / width), _BINS - 1)] += runs
    edges = [low + width * i for i in range(_BINS)] + [high]
    return [
        (f"{edges[i]:.3g} to {edges[i + 1]:.3g}", edges[i], edges[i + 1], totals[i]) for i in range(_BINS)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TaskGroups:
    """The groups of one task, oldest first: the runs of each, with their rewards."""

    task_id: str
    prompt: str
    groups: list[list[dict[str, Any]]]


def groups(store: ExperienceStore, number: int) -> list[TaskGroups]:
    """The tasks of a round's groups with the largest spread of rewards, with their groups of earlier rounds."""
    recent = [each for each in store.rounds() if 0 < each <= number][-_EARLIER:]
    with connect(store, rounds=[number]) as connection:
        mixed = [group for (group,) in connection.execute(_MIXED, [_GROUPS]).fetchall()]
        prompts = dict(connection.execute(_TASKS, [mixed]).fetchall()) if mixed else {}
    if not prompts:
        return []
    with connect(store, rounds=recent) as connection:
        runs = dicts(connection.execute(_RUNS, [list(prompts)]))
    found = []
    for task_id, messages in prompts.items():
        by_group = defaultdict[str, list[dict[str, Any]]](list)
        for run in runs:
            if run["task_id"] == task_id:
                by_group[run["group_id"]].append(run)
        found.append(TaskGroups(task_id, prompt_of(messages), list(by_group.values())[-_SIDE_BY_SIDE:]))
    return found
