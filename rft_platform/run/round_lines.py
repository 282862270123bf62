"""One-line result of each round, from its record."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rft_platform.evaluation.gate import promotion_rule
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.record import RoundEvaluation, Trained, read
from rft_platform.rounds.releases.training_start import describe_start
from rft_platform.rounds.reporting.round_history import time_split
from rft_platform.run.run_cost import launch_seconds

if TYPE_CHECKING:
    from rft_platform.rounds.project.project import Project

#: Reason why rows have no advantage, and the remedy.
EQUAL = "within each group all rewards are equal: use easier tasks, more runs per task, or a warm start"


@dataclass(frozen=True, slots=True)
class RoundLine:
    """Figures of one round. None: the stage has not ended, or the number was not measured. Round 0 is the start."""

    round: int
    reward: float | None = None  # mean over the explored runs
    judged_anew: bool = False  # ``reward`` is from another judgement than the one that the round's training used
    pass_rate_sampled: float | None = None  # of the held-out tasks
    pass_rate_greedy: float | None = None
    mismatch: float | None = None  # KL between engine and trainer for the same weights, k3 estimate, nats per token
    entropy: float | None = None  # nats per token
    rows: int | None = None
    runs: int | None = None
    failed_runs: int | None = None  # runs without rows after all attempts
    dropped_tasks: int | None = None  # tasks without rows, because their runs failed or were stopped
    tokens_per_s: float | None = None  # completion tokens of the rollouts
    optimizer_steps: int | None = None
    policy_version: int | None = None
    policies: dict[str, int] = field(default_factory=dict)  # versions of the further policies
    model_version: str | None = None
    champion: bool = False
    not_promoted: str | None = None  # why the gate refused the version, in a few words
    checkpoint: str | None = None
    trained_in: int | None = None  # dynamic styles: the round whose training took this round's rows, if different
    nothing_trained: str | None = None  # the reason, for a round without an optimiser step
    started_again: str | None = None  # from which version, for a training after a refused version
    seconds: dict[str, float] = field(default_factory=dict)  # rollout, judge, train, evaluation, overhead

    @property
    def failures(self) -> str | None:
        """The numbers of failed runs and dropped tasks in words; None if no run failed."""
        if not self.failed_runs:
            return None
        dropped = f", {self.dropped_tasks:,} tasks dropped" if self.dropped_tasks else ""
        return f"{self.failed_runs:,} of {self.runs:,} runs failed{dropped}"


def round_lines(project: "Project", last: int = 0) -> list[RoundLine]:
    """A line for every round that has begun, the starting policy first; with ``last`` only for the newest rounds."""
    walls = launch_seconds(project.home)
    lines = [round_line(project, number, walls.get(number)) for number in project.store.rounds()[-last:]]
    newest = max((line.round for line in lines if line.champion), default=None)
    took = _trainings(project, [line.round for line in lines])
    return [
        replace(
            line,
            champion=line.round == newest,
            trained_in=None if line.optimizer_steps else took.get(line.round),
        )
        for line in lines
    ]


def _trainings(project: "Project", rounds: list[int]) -> dict[int, int]:
    """For each round, the first training that took its rows."""
    took: dict[int, int] = {}
    for number in rounds:
        selection = read(project.store, number).selection()
        for source in selection.rounds if selection is not None else ():
            took.setdefault(source, number)
    return {source: number for source, number in took.items() if source != number}


def round_line(project: "Project", number: int, wall_s: float | None = None) -> RoundLine:
    """The line of one round; ``champion`` means that its evaluation promoted it. ``wall_s`` is of all its launches."""
    record, (_, *others) = read(project.store, number), project.policies
    explored, judged, trained = record.explored, record.judged, record.trained()
    evaluated, policy = record.evaluated, record.published()
    figures = explored.figures if explored else {}
    metrics, scores = trained.metrics if trained else {}, evaluated.metrics if evaluated else {}
    used = trained.lineage.get("judge_version") if trained else None
    return RoundLine(
        round=number,
        reward=judged.mean_reward if judged else None,
        judged_anew=used not in (None, judged.judge_version if judged else None),
        pass_rate_sampled=scores.get("sampled_pass"),
        pass_rate_greedy=scores.get("greedy_pass"),
        mismatch=metrics.get("mismatch_k3"),
        entropy=metrics.get("entropy"),
        rows=explored.rows if explored else None,
        runs=figures.get("runs"),
        failed_runs=figures.get("failed"),
        dropped_tasks=figures.get("dropped_groups"),
        tokens_per_s=explored.tokens_per_s if explored else None,
        optimizer_steps=trained.steps if trained else None,
        policy_version=policy.policy_version if policy else None,
        policies={name: found.policy_version for name in others if (found := record.published(name)) is not None},
        model_version=policy.model_version if policy else None,
        champion=evaluated.promoted if evaluated else False,
        not_promoted=_refusal(evaluated),
        checkpoint=policy.folder if policy else None,
        nothing_trained=nothing_trained(trained),
        started_again=describe_start(record.start) if trained and record.start else None,
        seconds=time_split(record, wall_s),
    )


def _refusal(evaluated: RoundEvaluation | None) -> str | None:
    """Why the gate refused the version of an evaluation; None if it did not."""
    if evaluated is None or evaluated.gate_passed is not False or evaluated.promoted:
        return None
    return evaluated.gate_summary or evaluated.gate


def champion_notes(project: "Project", lines: Sequence[RoundLine]) -> list[str]:
    """Why the newest version is not the champion, and the rule of the gate; empty if nothing needs an explanation."""
    champion = next((line.round for line in lines if line.champion), 0)
    refused = [line for line in lines if line.not_promoted and line.round > champion]
    if not refused:
        return []
    newest, best = refused[-1], max(refused, key=lambda line: line.pass_rate_sampled or 0.0)
    shown = {line.round: line for line in (best, newest)}
    reasons = [f"v{line.policy_version} was not promoted: {line.not_promoted}" for line in shown.values()]
    evaluated = (read(project.store, number).evaluated for number in project.store.rounds() if number)
    first = not any(each is not None and each.promoted for each in evaluated)
    settings = project.config.evaluation
    return [*reasons, promotion_rule(settings.gate, settings.regression, first=first)]


def nothing_trained(trained: Trained | None) -> str | None:
    """The reason why a training made no optimiser step; None if it made one or has not run yet."""
    if trained is None or trained.steps != 0:
        return None
    rows, dropped = (int(trained.metrics.get(name, 0)) for name in ("rows", "rows_dropped"))
    why = [f"all {rows:,} rows have advantage 0 ({EQUAL})"] if rows else []
    stale = trained.lineage.get("row_selection", {}).get("rows", {}).get("stale", 0)
    if dropped:
        others = rows or stale
        why.append(f"filters dropped {dropped:,} rows" if others else f"filters dropped all {dropped:,} rows")
    if stale:
        why.append(f"{stale:,} rows were older than synchronizer.max_staleness")
    return f"nothing trained: {', '.join(why) or 'there were no rows'}"


class RoundNews:
    """Returns, at each call, a line for each round completed since the previous call."""

    def __init__(self, project: "Project") -> None:
        self._project = project
        self._next = 0
        self()  # skip the rounds that are complete already

    def __call__(self) -> list[str]:
        """The lines of newly completed rounds, in order."""
        store, lines = self._project.store, []
        if not self._next and not read(store, 0).has(RoundEvaluation) and read(store, 1).has(RoundEvaluation):
            self._next = 1  # a training on a dataset may leave the base model unevaluated
        while read(store, self._next).has(RoundEvaluation):
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
    refused = f"not promoted: {line.not_promoted}" if line.not_promoted else None
    ends = ("champion" if line.champion else refused, line.failures, line.nothing_trained, line.started_again)
    return "  ".join([name, said, *filter(None, ends)])


def _said(value: float | None, form: str, prefix: str = "") -> str | None:
    return None if value is None else f"{prefix}{value:{form}}"
