"""The result of an evaluation as one JSON-serialisable value, with the runs that a report shows as transcripts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rft_platform.common.files import digest_json
from rft_platform.evaluation.metrics import BOOTSTRAP_SEED, PassRate, named, pass_rate, run_metrics
from rft_platform.experience.record import REWARD_ROUNDING, RolloutRow
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Transcript:
    """One run to read: the conversation, the answer and its reward."""

    task_id: str
    mode: str  # "sampled" or "greedy"
    reward: float
    messages: list[dict[str, Any]]  # of the run's last call, including its answer
    expected: str | None = None


def transcript(row: RolloutRow, task: Task, mode: str, reward: float) -> Transcript:
    """Build the transcript of the run whose last model call is ``row``."""
    return Transcript(row.task_id, mode, reward, [*row.call.messages, row.call.response], task.answer)


def choose(transcripts: Sequence[Transcript], count: int, pass_threshold: float) -> list[Transcript]:
    """Choose up to ``count`` runs, at most one per task (its first): half failed and half passed, if possible."""
    firsts: dict[str, Transcript] = {}
    for found in transcripts:
        firsts.setdefault(found.task_id, found)
    failed = [found for found in firsts.values() if found.reward < pass_threshold - REWARD_ROUNDING]
    passed = [found for found in firsts.values() if found.reward >= pass_threshold - REWARD_ROUNDING]
    kept = failed[: max(count // 2, count - len(passed))]
    return [*kept, *passed[: count - len(kept)]]


SAMPLED, GREEDY = "sampled", "greedy"
MODES = (SAMPLED, GREEDY)


@dataclass(frozen=True, slots=True)
class RunScore:
    """One judged run of one task."""

    taskset: str
    task_id: str
    mode: str  # "sampled" or "greedy"
    reward: float
    parts: dict[str, float] = field(default_factory=dict)  # the judge's parts and the workflow's metrics


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Scores of one policy on held-out tasks.

    ``metrics`` has entries such as ``eval/<taskset>/<metric>/mean@n``. ``sampled`` and ``greedy`` are pass rates over
    all tasks, None if that mode was not run (or none of its runs succeeded).
    """

    round: int
    policy_version: int
    tasks: int
    tasks_digest: str  # digest of the set of task ids; see ``measured_alike``
    sampled_n: int
    temperature: float
    seed: int
    pass_threshold: float  # minimum reward of a passed run
    measured_by: str  # digest of judge, workflow and sampling
    sampled: PassRate | None
    greedy: PassRate | None
    mean_reward: float | None  # over the sampled runs; without sampled runs, over the greedy ones
    failed_runs: int  # runs that failed after all retries or could not be judged; left out, not counted as wrong
    completion_tokens: int
    truncated_share: float
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    transcripts: list[Transcript] = field(default_factory=list)
    scores: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # mode -> task id -> rewards

    def summary(self) -> dict[str, float]:
        """The main numbers for plots and the gate: sampled_pass, greedy_pass, their intervals, mean_reward, ..."""
        values: dict[str, float] = {"truncated_share": self.truncated_share, "failed_runs": self.failed_runs}
        if self.mean_reward is not None:
            values["mean_reward"] = self.mean_reward
        for mode, rate in ((SAMPLED, self.sampled), (GREEDY, self.greedy)):
            if rate is not None:
                values |= {f"{mode}_pass": rate.value, f"{mode}_pass_low": rate.low, f"{mode}_pass_high": rate.high}
        return values

    @property
    def near_pass_share(self) -> float:
        """Share of the runs whose reward lies between 80 % of ``pass_threshold`` and ``pass_threshold``."""
        rewards = [reward for table in self.scores.values() for runs in table.values() for reward in runs]
        low, high = 0.8 * self.pass_threshold, self.pass_threshold - REWARD_ROUNDING
        return sum(low <= reward < high for reward in rewards) / len(rewards) if rewards else 0.0

    def value(self, metric: str) -> float | None:
        """Return a metric by its name in ``summary`` or in ``metrics``; None if it was not measured."""
        return self.summary().get(metric, self.metrics.get(metric))


def result_of(
    scores: Sequence[RunScore], pass_threshold: float, bootstrap_seed: int = BOOTSTRAP_SEED, **known: Any
) -> EvaluationResult:
    """Build the result from judged runs; ``known`` are the fields that the runs do not determine."""
    tables = {mode: by_task(score for score in scores if score.mode == mode) for mode in MODES}
    measured = {mode: table for mode, table in tables.items() if table}
    rates = {mode: pass_rate(table, pass_threshold) for mode, table in measured.items()}
    first = next(iter(measured.values()), {})
    return EvaluationResult(
        **known,
        pass_threshold=pass_threshold,
        sampled=rates.get(SAMPLED),
        greedy=rates.get(GREEDY),
        mean_reward=fmean(map(fmean, first.values())) if first else None,
        metrics=named_metrics(scores, pass_threshold, bootstrap_seed),
        scores=measured,
    )


def measured_alike(one: EvaluationResult, other: EvaluationResult) -> bool:
    """Whether two results are comparable: same tasks, and same judge, workflow and sampling."""
    return (one.tasks_digest, one.measured_by) == (other.tasks_digest, other.measured_by)


def tasks_digest(task_ids: Iterable[str]) -> str:
    """Digest of a set of tasks, in any order."""
    return digest_json(sorted(set(task_ids)))


def by_task(scores: Iterable[RunScore], metric: str | None = None) -> dict[str, list[float]]:
    """Rewards (or a named part) of the runs of each task."""
    table: dict[str, list[float]] = {}
    for score in scores:
        value = score.reward if metric is None else score.parts.get(metric)
        if value is not None:
            table.setdefault(score.task_id, []).append(value)
    return table


def named_metrics(scores: Sequence[RunScore], threshold: float, seed: int = BOOTSTRAP_SEED) -> dict[str, float]:
    """``eval/<taskset>/<metric>/...`` for every taskset: reward, pass and each part; ``greedy_<metric>`` if greedy."""
    metrics: dict[str, float] = {}
    for taskset, mode in sorted({(score.taskset, score.mode) for score in scores}):
        chosen = [score for score in scores if score.taskset == taskset and score.mode == mode]
        prefix = "" if mode == SAMPLED else f"{mode}_"
        rewards = by_task(chosen)
        passes = {
            task: [float(reward >= threshold - REWARD_ROUNDING) for reward in runs] for task, runs in rewards.items()
        }
        tables = {"reward": rewards, "pass": passes}
        for part in sorted({name for score in chosen for name in score.parts} - set(tables)):
            tables[part] = by_task(chosen, part)
        for name, table in tables.items():
            metrics |= named(taskset, prefix + name, run_metrics(table, seed))
    return metrics
