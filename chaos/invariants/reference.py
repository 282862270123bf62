"""Invariants against the undisturbed run: rows, notes, checkpoints, evaluations, metrics and checks are equal.

Only what depends on the machine or counts attempts is left out of a comparison; the lists stand below.
"""

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import dagster as dg

from chaos.invariants.context import Context, Finding
from rft_platform.assets.checks import CHECKPOINT_CHECKS, EVALUATION_CHECKS, EXPERIENCE_CHECKS
from rft_platform.experience.file_names import round_key
from rft_platform.jobs.instance import open_instance
from rft_platform.model_registry.models import DIGEST_TAG
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import published
from rft_platform.training.checkpoint.manifest import STEPS, read_manifest

#: Columns of a rollout row that depend on the machine, count attempts, or are random names.
_ROLLOUT_EXTRAS = {"created_at", "duration_s", "attempt", "msg_id"}
#: Ends of the names of metrics and of keys in notes that depend on the machine.
_OF_THE_MACHINE = re.compile(r"(seconds|_s|mfu|peak_rss_mb)$")
#: Keys of notes that count attempts, or depend on which process was restarted when, on the moment at which the campaign
#: raised the number of rounds (``config_digest``), or on a commit during the campaign (``code_version``).
_OF_ATTEMPTS = {
    "$sha256", "canary_delta", "client_retries", "code_version", "config_digest", "dagster_run_id", "data_digest",
    "digests", "retried", "reused", "reported_before",
}  # fmt: skip
_NOTES = ("snapshot-policy", "explore", "judge", "train-policy", "policy-policy", "evaluation")
_METRICS = "SELECT run_uuid, key, step, value, is_nan FROM metrics"
_PARTITION_TAG = "dagster/partition"
_SHOWN = 3
_HISTORY = 10_000  # results of one check

_Points: TypeAlias = dict[tuple[str, int], tuple[float, int]]


def rows_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """Every round has the rows of the reference, equal in every column but times and attempts."""
    if context.reference is None:
        return
    for number in context.numbers:
        ours, theirs = context.project.store, context.reference.store
        if _by_id(ours.read_rollouts(number)) != _by_id(theirs.read_rollouts(number)):
            yield Finding(f"{round_key(number)}: rollouts differ from those of the undisturbed run", number)
        if _by_id(ours.read_judged(number)) != _by_id(theirs.read_judged(number)):
            yield Finding(f"{round_key(number)}: judgements differ from those of the undisturbed run", number)


def notes_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """Every note says what the reference's says: counts, selections, metrics, scores, comparisons, gate, versions."""
    if context.reference is None:
        return
    for number in (0, *context.numbers):
        for name in _NOTES:
            ours, theirs = (project.store.read_note(number, name) for project in (context.project, context.reference))
            if different := sorted(_differences(ours, theirs)):
                shown = ", ".join(different[:_SHOWN])
                yield Finding(f"{round_key(number)}: note {name} differs from the undisturbed run in {shown}", number)


def checkpoints_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """Every file that both checkpoints of a round have is the same, the optimizer's and random state included.

    Files of tensors have the same tensors: several ranks write the entries of their headers in any order.
    """
    if context.reference is None:
        return
    compared = 0
    for number in context.numbers:
        ours, theirs = (_digests(project, number) for project in (context.project, context.reference))
        common = (ours.keys() & theirs.keys()) - {STEPS}  # which holds durations
        compared += len(common)
        changed = sorted(name for name in common if ours[name] != theirs[name])
        if different := [name for name in changed if not _same_tensors(context, number, name)]:
            yield Finding(f"{round_key(number)}: {', '.join(different)} differ from the undisturbed run", number)
    context.facts["checkpoint_files_compared"] = float(compared)


def metrics_are_single(context: Context) -> Iterator[Finding]:
    """MLflow has one run, and each metric once per name and step."""
    found = _metrics(context.project)
    points = Counter((key, step) for _, key, step, *_ in found)
    doubled = [f"{key} at step {step}" for (key, step), count in points.items() if count > 1]
    context.facts["mlflow_metrics"] = float(len(points))
    context.facts["mlflow_metrics_doubled"] = float(len(doubled))
    if doubled:
        yield Finding(f"{len(doubled)} metrics stand more than once, {', '.join(doubled[:_SHOWN])} among them")
    if (runs := _count_runs(context.project)) != 1:
        yield Finding(f"MLflow has {runs} runs, expected 1")


def metrics_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """MLflow has the metrics of the reference, no more and no fewer, with equal values except timings."""
    if context.reference is None:
        return
    ours, theirs = _points(context.project), _points(context.reference)
    different = [
        f"{key} at step {step}"
        for key, step in sorted(ours.keys() | theirs.keys())
        if (key, step) not in ours
        or (key, step) not in theirs
        or (ours[key, step] != theirs[key, step] and not _OF_THE_MACHINE.search(key))
    ]
    context.facts["mlflow_metrics_compared"] = float(sum(not _OF_THE_MACHINE.search(key) for key, _ in theirs))
    if different:
        yield Finding(
            f"{len(different)} metrics differ from the undisturbed run, {', '.join(different[:_SHOWN])} among them"
        )


def model_versions_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """MLflow's model versions have the numbers, rounds and weights of the reference, and so has the champion."""
    if context.reference is None:
        return
    both = [context, Context(context.reference, context.rounds)]
    ours, theirs = (
        {str(version.version): (version.tags.get("round"), version.tags.get(DIGEST_TAG)) for version in versions}
        for versions in (one.registry().versions() for one in both)
    )
    if ours != theirs:
        yield Finding(f"model versions {ours} differ from the undisturbed run's {theirs}")
    champions = [None if found is None else str(found.version) for found in (one.registry().champion() for one in both)]
    if champions[0] != champions[1]:
        yield Finding(f"the champion is version {champions[0]}, in the undisturbed run version {champions[1]}")


def checks_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """The last result of every asset check of every round is that of the reference."""
    if context.reference is None:
        return
    ours, theirs = _check_results(context.project), _check_results(context.reference)
    context.facts["asset_checks_compared"] = float(len(theirs))
    different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if different:
        shown = ", ".join(" ".join(key) for key in different[:_SHOWN])
        yield Finding(
            f"{len(different)} of {len(theirs)} asset checks differ from the undisturbed run, {shown} among them"
        )


def _by_id(table: Any) -> dict[str, dict[str, Any]]:
    return {
        row["row_id"]: {name: value for name, value in row.items() if name not in _ROLLOUT_EXTRAS}
        for row in table.to_pylist()
    }


def _differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """The paths of the values that differ, without those of the machine and of attempts."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            if key not in _OF_ATTEMPTS and not _OF_THE_MACHINE.search(key):
                yield from _differences(ours.get(key), theirs.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{path}/{number}")
    elif ours != theirs:
        yield path or "/"


def _digests(project: Project, number: int) -> dict[str, str]:
    policy = published(project.store, number)
    manifest = None if policy is None else read_manifest(Path(policy.folder))
    return {} if manifest is None else {name: file["sha256"] for name, file in manifest.files.items()}


def _same_tensors(context: Context, number: int, name: str) -> bool:
    """Whether a file of a round's checkpoint holds the tensors of the reference, bit for bit."""
    from numpy import array_equal
    from safetensors.numpy import load_file

    if "-of-" not in name or context.reference is None:
        return False
    policies = [published(project.store, number) for project in (context.project, context.reference)]
    ours, theirs = (load_file(Path(policy.folder) / name) for policy in policies if policy is not None)
    return ours.keys() == theirs.keys() and all(array_equal(ours[key], theirs[key]) for key in ours)


def _points(project: Project) -> _Points:
    return {(key, step): (value, is_nan) for _, key, step, value, is_nan in _metrics(project)}


def _metrics(project: Project) -> list[tuple[str, str, int, float, int]]:
    with closing(_mlflow(project)) as connection:
        return connection.execute(_METRICS).fetchall()


def _count_runs(project: Project) -> int:
    with closing(_mlflow(project)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM runs").fetchone()[0])


def _mlflow(project: Project) -> sqlite3.Connection:
    return sqlite3.connect(f"{(project.home.mlflow / 'mlflow.db').absolute().as_uri()}?mode=ro", uri=True)


def _round_of(result: dg.AssetCheckEvaluation) -> str:
    named = result.metadata.get("round")
    return "-" if named is None else round_key(int(str(named.value)))


def _check_results(project: Project) -> dict[tuple[str, str, str], bool]:
    """The newest result of each check, by partition, asset and name.

    Results without a run are those of rounds whose run was killed before it recorded them; they name their round.
    """
    found: dict[tuple[str, str, str], tuple[float, bool]] = {}
    with open_instance(project.home) as instance:
        partitions = {run.run_id: run.tags.get(_PARTITION_TAG, "-") for run in instance.get_runs()}
        for spec in (*EXPERIENCE_CHECKS, *CHECKPOINT_CHECKS, *EVALUATION_CHECKS):
            for record in instance.event_log_storage.get_asset_check_execution_history(spec.key, limit=_HISTORY):
                if record.event is None or record.event.dagster_event is None:
                    continue  # planned, but its run was killed
                event = record.event.dagster_event
                if event.event_type != dg.DagsterEventType.ASSET_CHECK_EVALUATION:
                    continue
                result = event.asset_check_evaluation_data
                partition = partitions.get(record.run_id) or _round_of(result)
                key = (partition, result.asset_key.to_user_string(), result.check_name)
                found[key] = max(found.get(key, (0.0, False)), (record.event.timestamp, result.passed))
    return {key: passed for key, (_, passed) in found.items()}
