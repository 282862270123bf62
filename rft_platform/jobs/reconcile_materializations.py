"""Reconcile Dagster with the disk: report assets of launches that finished but were killed before reporting them.

Milliseconds pass between a launch's last note and Dagster's records of the asset and of its checks. A process killed in
that time has done its work, and the plan continues from there. Without a new report, the lineage would lack a
materialization, or a check would lack its result.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from rft_platform.assets.checks import EVALUATION_CHECKS, EXPERIENCE_CHECKS, evaluation_results, experience_results
from rft_platform.assets.common import numbers
from rft_platform.common.errors import StorageError
from rft_platform.experience.file_names import round_key, round_number
from rft_platform.resources.names import PLAIN_NAMES, DagsterNames
from rft_platform.rounds.project.notes import EVALUATION, JUDGE
from rft_platform.rounds.project.policy import published
from rft_platform.rounds.project.project import Project

#: The last asset of each kind of launch, and that asset's note. Kinds without an entry end in an evaluation.
_ENDS = {"explore": ("judged_experiences", JUDGE), "warm_start": ("warm_start_checkpoint", EVALUATION)}
_EVALUATED = ("evaluation_report", EVALUATION)
#: The checks of each of these assets; a missing result is reported again.
_CHECKS: Mapping[str, Sequence[dg.AssetCheckSpec]] = {
    "judged_experiences": EXPERIENCE_CHECKS,
    "evaluation_report": EVALUATION_CHECKS,
}
_RECENT = 8  # newest rounds whose check results are searched: else each tick would read the events of every round
_RESULTS = 200  # number of newest results of a check that are searched for the result of a recent round

LOG = logging.getLogger(__name__)


def reconcile_materializations(
    project: Project,
    instance: dg.DagsterInstance,
    launched: Iterable[tuple[str, int]],
    names: DagsterNames = PLAIN_NAMES,
) -> list[str]:
    """Report the last asset of each of ``launched`` (kind, round) that is complete on disk and unknown to Dagster.

    Meant for launches whose newest run failed, because a successful run has reported its assets. An asset whose files
    are damaged is left for a later call. Returns the reported assets.
    """
    reported = []
    for kind, number in launched:
        if kind == "evaluate":  # the existing note is from an evaluation before the failed one
            continue
        asset, name = _ENDS.get(kind, _EVALUATED)
        note = project.store.read_note(number, name)
        if note is None or (name == JUDGE and not note["sound"]) or _is_known(instance, names, asset, number):
            continue
        try:
            results = list(_check_results(project, names, asset, number, note))
            materialization = _materialization(project, names, asset, number, note)
        except StorageError as error:
            LOG.warning("%s of %s is not reported to Dagster yet: %s", asset, round_key(number), error)
            continue
        for result in results:
            if not _is_reported(instance, result):
                instance.report_runless_asset_event(result)
        instance.report_runless_asset_event(materialization)  # last: it marks the results as recorded
        reported.append(f"{asset} of {round_key(number)}")
    return reported


def _is_known(instance: dg.DagsterInstance, names: DagsterNames, asset: str, number: int) -> bool:
    key = names.key(asset)
    if number == 0:
        return instance.get_latest_materialization_event(key) is not None
    known = instance.get_materialized_partitions(key)
    if round_key(number) not in known:
        return False
    return max(map(round_number, known)) >= number + _RECENT or _has_checks(instance, key, round_key(number))


def _has_checks(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str) -> bool:
    """Whether the run of the newest materialization recorded results of all checks of the asset.

    A materialization that this module reported always has them. The run's own log is not read: Dagster writes a result
    first to this log and then to the results of the check, and a kill between both leaves the second one missing. If a
    result is missing, all results are reported again with a new materialization, because results belong to the newest
    materialization.
    """
    records = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition]), limit=1
    ).records
    run_id = records[0].event_log_entry.run_id if records else ""
    if not run_id:
        return True
    run = instance.get_run_by_id(run_id)
    if run is not None and not run.is_finished:  # it may still report them; a run that was killed ends soon
        return True
    return all(
        _has_result(instance, dg.AssetCheckKey(key, spec.name), run_id) for spec in _CHECKS.get(key.path[-1], ())
    )


def _has_result(instance: dg.DagsterInstance, check: dg.AssetCheckKey, run_id: str) -> bool:
    """Whether the check has a result of the run; a planned check without a result does not count."""
    for record in instance.event_log_storage.get_asset_check_execution_history(check, limit=_RESULTS):
        event = None if record.event is None else record.event.dagster_event
        if record.run_id == run_id and event is not None:
            return event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION
    return False


def _is_reported(instance: dg.DagsterInstance, result: dg.AssetCheckEvaluation) -> bool:
    """Whether an earlier call reported the result: Dagster stores one result without a run for a check of a round."""
    history = instance.event_log_storage.get_asset_check_execution_history(result.asset_check_key, limit=_RESULTS)
    known = [record for record in history if record.run_id == "" and record.partition == result.partition]
    if known and (known[0].status.value == "SUCCEEDED") != result.passed:
        key, said = result.asset_check_key.to_user_string(), "passes" if result.passed else "fails"
        LOG.warning("%s of %s %s now; Dagster keeps the result reported before", key, result.partition, said)
    return bool(known)


def _check_results(
    project: Project, names: DagsterNames, asset: str, number: int, note: dict[str, Any]
) -> Iterable[dg.AssetCheckEvaluation]:
    """The results that the killed process would have recorded, computed again from the disk."""
    if asset == "judged_experiences":
        from rft_platform.rounds.judge import quality

        results = experience_results(*quality(project, number, note["judge_version"]))
    elif asset == "evaluation_report":
        from rft_platform.rounds.evaluate import gate_passed

        results = evaluation_results(gate_passed(note), note.get("gate", ""))
    else:
        return
    for result in results:
        yield dg.AssetCheckEvaluation(
            asset_key=names.key(asset),
            check_name=str(result.check_name),
            passed=result.passed,
            severity=result.severity,
            metadata={**result.metadata, "round": number},
            partition=round_key(number),
        )


def _materialization(
    project: Project, names: DagsterNames, asset: str, number: int, note: dict[str, Any]
) -> dg.AssetMaterialization:
    version = _data_version(project, asset, number, note)
    return dg.AssetMaterialization(
        asset_key=names.key(asset),
        partition=round_key(number) if number else None,
        description="Complete on disk; the process that created it ended before it reported this materialization.",
        metadata={**numbers(note), **numbers(note.get("metrics", {}))},
        tags={} if version is None else {"dagster/data_version": version},
    )


def _data_version(project: Project, asset: str, number: int, note: dict[str, Any]) -> str | None:
    if asset == "judged_experiences":
        return f"{project.store.digest(number)[:16]}+{note['judge_version']}"
    policy = published(project.store, number)
    return policy.weights_digest if asset == "warm_start_checkpoint" and policy is not None else None
