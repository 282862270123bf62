"""Invariants against the undisturbed run: rows, judgements, evaluations and metrics are equal, metrics are unique."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from chaos.invariants.context import Context, Finding
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.project import Project

_ROLLOUT_COLUMNS = ["row_id", "prompt_ids", "response_ids", "rollout_logprobs", "policy_version", "finish_reason"]
_JUDGED_COLUMNS = ["row_id", "reward", "advantage"]
_METRICS = "SELECT run_uuid, key, step, value FROM metrics"
#: Parts of the names of metrics that depend on the machine.
_OF_THE_MACHINE = (
    "second",
    "time",
    "rss",
    "memory",
    "per_s",
    "_s",
    "mfu",
    "flops",
    "tokens_per",
    "wait",
    "cpu",
    "/age",
)
_RESULT = ("name", "sampled", "greedy", "mean_reward", "scores")  # fields of an evaluation that are compared
_SHOWN = 3


def rows_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """Every round has the rows of the reference: equal tokens, log-probs, versions, rewards, advantages by row id."""
    if context.reference is None:
        return
    for number in context.numbers:
        ours, theirs = context.project.store, context.reference.store
        if _by_id(ours.read_rollouts(number, _ROLLOUT_COLUMNS)) != _by_id(
            theirs.read_rollouts(number, _ROLLOUT_COLUMNS)
        ):
            yield Finding(f"{round_key(number)}: rollouts differ from those of the undisturbed run", number)
        if _by_id(ours.read_judged(number, columns=_JUDGED_COLUMNS)) != _by_id(
            theirs.read_judged(number, columns=_JUDGED_COLUMNS)
        ):
            yield Finding(f"{round_key(number)}: judgements differ from those of the undisturbed run", number)


def evaluations_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """Every round that the reference evaluated has its scores.

    The last round of a budget is always evaluated, and a campaign raises the budget while kills are left: rounds that
    were the last one for a while have an evaluation that the reference lacks.
    """
    if context.reference is None:
        return
    for number in context.numbers:
        ours, theirs = (_results(project, number) for project in (context.project, context.reference))
        if theirs and ours != theirs:
            yield Finding(f"{round_key(number)}: evaluation {ours}, undisturbed {theirs}", number)


def metrics_are_single(context: Context) -> Iterator[Finding]:
    """MLflow has each metric once per run, name and step."""
    points = Counter((run, key, step) for run, key, step, _ in _metrics(context.project))
    doubled = [f"{key} at step {step}" for (_, key, step), count in points.items() if count > 1]
    context.facts["mlflow_metrics"] = float(len(points))
    context.facts["mlflow_metrics_doubled"] = float(len(doubled))
    if doubled:
        yield Finding(f"{len(doubled)} metrics stand more than once, {', '.join(doubled[:_SHOWN])} among them")


def metrics_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """MLflow has the metrics of the reference, except timings, for the rounds that both have.

    The metrics of an evaluation are compared only if the reference evaluated that round, too; those that compare it
    with other policies (``eval/vs_*``) only up to the first evaluation that the reference lacks, which may have
    promoted another champion.
    """
    if context.reference is None:
        return
    ours, theirs = (
        {(key, step): value for _, key, step, value in _metrics(p)} for p in (context.project, context.reference)
    )
    steps = {key: max(step for name, step in ours if name == key) for key, _ in ours}
    expected = {point: value for point, value in theirs.items() if point[1] <= steps.get(point[0], -1)}
    compared = {point for point in {*ours, *expected} if not any(part in point[0] for part in _OF_THE_MACHINE)}
    compared -= {point for point in compared if point not in theirs and point[0].startswith("eval/")}
    extra = min(
        (n for n in context.numbers if _results(context.project, n) and not _results(context.reference, n)),
        default=None,
    )
    if extra is not None:
        compared -= {point for point in compared if point[0].startswith("eval/vs_") and point[1] > extra}
    different = [
        f"{key} at step {step}" for key, step in sorted(compared) if ours.get((key, step)) != expected.get((key, step))
    ]
    if different:
        yield Finding(
            f"{len(different)} of {len(compared)} metrics differ from the undisturbed run, "
            f"{', '.join(different[:_SHOWN])} among them"
        )


def _by_id(table: Any) -> dict[str, dict[str, Any]]:
    return {row["row_id"]: row for row in table.to_pylist()}


def _results(project: Project, number: int) -> Any:
    note = project.store.read_note(number, "evaluation") or {}
    return [{name: value for name, value in result.items() if name in _RESULT} for result in note.get("results") or []]


def _metrics(project: Project) -> list[tuple[str, str, int, float]]:
    file = Path(project.home.mlflow) / "mlflow.db"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        return connection.execute(_METRICS).fetchall()
