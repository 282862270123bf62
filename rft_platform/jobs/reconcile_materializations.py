"""Reconcile Dagster with the disk: report the assets of a project that are complete but unknown to its instance.

Two causes: milliseconds pass between a stage's note and Dagster's records of the asset and of its checks, and a process
may be killed in that time; and ``rft run`` records its runs in the instance of the project's folder, while another
deployment may mount the folder. A reported materialization belongs to no run and has no provenance: Dagster then
compares the times of an asset and its inputs, so the assets of a round are reported in their order.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import dagster as dg

from rft_platform.assets.checks import (
    CHECKPOINT_CHECKS,
    EVALUATION_CHECKS,
    EXPERIENCE_CHECKS,
    audited,
    checkpoint_results,
    checkpoint_specs,
    evaluation_results,
    experience_results,
    leak_result,
    offline_results,
)
from rft_platform.assets.common import numbers, path
from rft_platform.assets.experiences import judgement_version
from rft_platform.assets.tasks import explored_count, held_out_leaks, held_out_version
from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import RftError, TransientError
from rft_platform.experience.file_names import round_key
from rft_platform.jobs.dagster_internals.masked_instance import AssetCheckExecutionRecord, check_results
from rft_platform.jobs.jobs import OFFLINE_ASSETS
from rft_platform.jobs.reconcile_imports import reconcile_imports
from rft_platform.resources.names import PLAIN_NAMES, DagsterNames
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    DatasetFile,
    Explored,
    Judged,
    Part,
    Policy,
    RoundEvaluation,
    RoundRecord,
    read,
    required,
)

LOG = logging.getLogger(__name__)
_A_CALL_S = 20.0

_Launch = tuple[str, int]  # kind and round


def _figures(_: Project, __: RoundRecord, part: Part) -> dict[str, Any]:
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    return {**numbers(values), **numbers(values.get("figures", {})), **numbers(values.get("metrics", {}))}


@dataclass(frozen=True, slots=True)
class _Asset:
    """How the materialization of an asset follows from the part that its stage made, and from what else is stored."""

    name: str
    part: Callable[[RoundRecord], Part | None]  # None: the asset is not complete
    version: Callable[[Project, RoundRecord, Any], str | None] = lambda _, __, ___: None
    metadata: Callable[[Project, RoundRecord, Any], dict[str, Any]] = _figures
    checks: Callable[[Project, RoundRecord, Any], list[dg.AssetCheckResult]] = lambda _, __, ___: []
    specs: Sequence[dg.AssetCheckSpec] = ()


@dataclass(slots=True)
class _Reports:
    """The reports of one call."""

    project: Project
    instance: dg.DagsterInstance
    names: DagsterNames
    made: list[str] = field(default_factory=list)

    def report(self, asset: _Asset, number: int, partition: str | None) -> bool:
        """Report an asset with the results of its checks, unless it is not complete; False if it cannot be read now."""
        record = read(self.project.store, number)
        part = asset.part(record)
        if part is None:
            return True
        try:
            results = [
                self._result(asset, result, number, partition) for result in asset.checks(self.project, record, part)
            ]
            materialization = dg.AssetMaterialization(
                asset_key=self.names.key(asset.name),
                partition=partition,
                description="Complete on disk, and not reported to this Dagster instance by the run that made it.",
                metadata=asset.metadata(self.project, record, part),
                tags=_version_tag(asset.version(self.project, record, part)),
            )
        except (RftError, OSError) as error:
            LOG.warning("%s of %s is not reported to Dagster yet: %s", asset.name, round_key(number), error)
            return False
        for result in results:
            if not _is_reported(self.instance, result):
                self.instance.report_runless_asset_event(result)
        self.instance.report_runless_asset_event(materialization)  # last: it marks the results as recorded
        self.made.append(f"{asset.name} of {round_key(number)}")
        return True

    def _result(
        self, asset: _Asset, result: dg.AssetCheckResult, number: int, partition: str | None
    ) -> dg.AssetCheckEvaluation:
        return dg.AssetCheckEvaluation(
            asset_key=self.names.key(asset.name),
            check_name=str(result.check_name),
            passed=result.passed,
            severity=result.severity,
            metadata={**result.metadata, "round": number},
            partition=partition,
        )


def reconcile_materializations(
    project: Project,
    instance: dg.DagsterInstance,
    failed: Collection[_Launch] = (),
    running: Collection[_Launch] = (),
    names: DagsterNames = PLAIN_NAMES,
    *,
    within_s: float = _A_CALL_S,
) -> list[str]:
    """Report the assets that are complete on disk and unknown to Dagster, with the results of their checks.

    Launches are given as (kind, round). After ``failed`` ones the results of the last asset's checks are verified too;
    rounds of ``running`` ones are left to their runs. An asset whose files are damaged is left for a later call, as is
    what does not fit into ``within_s``, except for one asset. Returns the reported assets.
    """
    reports = _Reports(project, instance, names)
    try:
        with locked(project.home.leases / "reconcile", timeout_s=0.0):  # two sensors may tick at the same time
            reports.made += [f"imported_traces of {name}" for name in reconcile_imports(project.home, instance, names)]
            _reconcile(reports, set(failed), {number for _, number in running}, within_s)
    except TransientError as busy:
        LOG.info("%s", busy)
    return reports.made


def _reconcile(reports: _Reports, failed: set[_Launch], running: set[int], within_s: float) -> None:
    chain = _chain(reports.project)
    if 0 not in running and reports.project.settings.offline is None:
        for asset in _START:
            if reports.instance.get_latest_materialization_event(reports.names.key(asset.name)) is None:
                reports.report(asset, 0, None)
    doubtful = {(_LAST.get(kind, "evaluation_report"), number) for kind, number in failed if kind != "evaluate"}
    known = {each.name: reports.instance.get_materialized_partitions(reports.names.key(each.name)) for each in chain}
    until = time.monotonic() + within_s
    for number in reports.project.store.rounds():
        if number in running or number == 0:
            continue
        key = round_key(number)
        for asset in chain:
            if key in known[asset.name] and ((asset.name, number) not in doubtful or _has_checks(reports, asset, key)):
                continue
            if not reports.report(asset, number, key):
                break  # the later assets of the round follow it: Dagster compares their times
            if reports.made and time.monotonic() > until:  # every call makes progress
                return


def _has_checks(reports: _Reports, asset: _Asset, partition: str) -> bool:
    """Whether the run of the newest materialization recorded results of all checks of the asset.

    A materialization that this module reported always has them. The run's own log is not read: Dagster writes a result
    first to this log and then to the results of the check, and a kill between both leaves the second one missing. If a
    result is missing, all results are reported again with a new materialization, because results belong to the newest
    materialization.
    """
    instance, key = reports.instance, reports.names.key(asset.name)
    records = instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=key, asset_partitions=[partition]), limit=1
    ).records
    run_id = records[0].event_log_entry.run_id if records else ""
    if not run_id:
        return True
    run = instance.get_run_by_id(run_id)
    if run is not None and not run.is_finished:  # it may still report them; a run that was killed ends soon
        return True
    keys = [dg.AssetCheckKey(key, spec.name) for spec in asset.specs]
    return all(_has_result(check_results(instance, check, partition), run_id) for check in keys)


def _has_result(records: Sequence[AssetCheckExecutionRecord], run_id: str) -> bool:
    """Whether the check has a result of the run; a planned check without a result does not count."""
    for record in records:
        event = None if record.event is None else record.event.dagster_event
        if record.run_id == run_id and event is not None:
            return event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION
    return False


def _is_reported(instance: dg.DagsterInstance, result: dg.AssetCheckEvaluation) -> bool:
    """Whether an earlier call reported the result: Dagster stores one result without a run for a check of a round."""
    known = [each for each in check_results(instance, result.asset_check_key, result.partition) if each.run_id == ""]
    if known and (known[0].status.value == "SUCCEEDED") != result.passed:
        key, verb = result.asset_check_key.to_user_string(), "passes" if result.passed else "fails"
        LOG.warning("%s of %s %s now; Dagster keeps the result reported before", key, result.partition, verb)
    return bool(known)


def _version_tag(version: str | None) -> dict[str, str]:
    return {} if version is None else {"dagster/data_version": version}


# --- the assets of a project, in the order of their stages


def _sound(record: RoundRecord) -> Judged | None:
    return record.judged if record.judged is not None and record.judged.sound else None


def _judgement_version(project: Project, record: RoundRecord, judged: Judged) -> str:
    return judgement_version(project.store, record.number, judged.judge_version)


def _judgement_checks(project: Project, record: RoundRecord, judged: Judged) -> list[dg.AssetCheckResult]:
    from rft_platform.rounds.judge import quality
    from rft_platform.rounds.reporting.reward_audit import audit_round

    if project.store.ledger(record.number).read().retired:  # the rows were removed on purpose: nothing is left to check
        return []
    audit = audit_round(project.store, record.number)
    if not project.store.rows_are_here(record.number):  # a tick fetches no rows from an object store
        return [audited(finding) for finding in audit]
    return experience_results(*quality(project, record.number, judged.judge_version), audit)


def _checkpoint(project: Project, record: RoundRecord, policy: Policy) -> dict[str, Any]:
    trained = record.trained()
    figures = {} if trained is None else _figures(project, record, trained)
    found = {"checkpoint": path(policy.folder), "model_version": policy.model_version or "not registered"}
    return {**found, **figures, "policy_version": policy.policy_version}


def _report(project: Project, record: RoundRecord, evaluated: RoundEvaluation) -> dict[str, Any]:
    from rft_platform.evaluation.report import stored_report

    page = stored_report(project.store.round_folder(record.number))
    report = {} if page is None else {"report": dg.MetadataValue.md(page)}
    return {**report, "gate": evaluated.gate, "promoted": evaluated.promoted, **_figures(project, record, evaluated)}


def _checkpoint_checks(_: Project, record: RoundRecord, __: Policy) -> list[dg.AssetCheckResult]:
    trained = record.trained()
    return checkpoint_results(*((0, None) if trained is None else (trained.steps, trained.engine_mismatch)))


def _offline_checks(_: Project, record: RoundRecord, __: Policy) -> list[dg.AssetCheckResult]:
    trained = record.trained()
    return offline_results([] if trained is None else trained.step_events)


def _evaluation_checks(project: Project, record: RoundRecord, evaluated: RoundEvaluation) -> list[dg.AssetCheckResult]:
    from rft_platform.rounds.reporting.reward_audit import audit_evaluation

    audit = audit_evaluation(project, record.number)
    return evaluation_results(evaluated.gate_passed, evaluated.gate, evaluated.regression, audit)


def _dataset_checks(project: Project, _: RoundRecord, __: DatasetFile) -> list[dg.AssetCheckResult]:
    from rft_platform.rounds.offline import leaked_tasks, load_dataset

    return [leak_result(leaked_tasks(project, load_dataset(project)))]


def _rows_version(project: Project, record: RoundRecord, _: Explored) -> str:
    return project.store.rollouts_digest(record.number)


def _weights(_: Project, __: RoundRecord, policy: Policy) -> str:
    return policy.weights_digest


_explored, _evaluated = attrgetter("explored"), attrgetter("evaluated")
_JUDGED = _Asset(
    "judged_experiences",
    _sound,
    _judgement_version,
    checks=_judgement_checks,
    specs=EXPERIENCE_CHECKS,
)
_TRAINED = _Asset(
    "policy_checkpoint", RoundRecord.published, _weights, _checkpoint, _checkpoint_checks, CHECKPOINT_CHECKS
)
_EVALUATED = _Asset(
    "evaluation_report", _evaluated, metadata=_report, checks=_evaluation_checks, specs=EVALUATION_CHECKS
)
_EXPLORED = [
    _Asset("policy_snapshot", RoundRecord.snapshot, _weights),
    _Asset("rollout_batches", _explored, _rows_version),
]
_COLLECTED = [
    _Asset("online_experiences", _explored, _rows_version),
    _Asset("online_demonstrations", attrgetter("demonstrations"), lambda _, __, found: found.sha256 or "none"),
]
#: The assets that have no rounds, complete when the start is evaluated.
_START = [
    _Asset(
        "task_dataset",
        _evaluated,
        lambda project, _, __: project.tasks.digest if project.config.buffer.explorer_input.explored else None,
        lambda project, _, __: {"dagster/row_count": explored_count(project)},
    ),
    _Asset(
        "eval_task_dataset",
        _evaluated,
        lambda project, _, __: held_out_version(project),
        lambda project, _, __: {"dagster/row_count": sum(len(each.tasks) for _, each in project.eval_tasks)},
        lambda project, _, __: [leak_result(held_out_leaks(project))],
    ),
    _Asset(
        "warm_start_checkpoint",
        _evaluated,
        lambda project, _, __: required(project.store, 0).weights_digest,
        _report,
    ),
]
#: The last asset of each kind of launch, if that is not the evaluation.
_LAST = {"explore": "judged_experiences", "collect": "judged_experiences", "warm_start": "warm_start_checkpoint"}


def _chain(project: Project) -> list[_Asset]:
    """The assets of a round of the project."""
    kind = project.settings.offline
    if kind is None:
        return [*(_COLLECTED if project.traffic is not None else _EXPLORED), _JUDGED, _TRAINED, _EVALUATED]
    dataset, weights = OFFLINE_ASSETS[kind]
    return [
        _Asset(dataset, attrgetter("dataset"), lambda _, __, file: file.digest, checks=_dataset_checks),
        _Asset(weights, RoundRecord.published, _weights, _checkpoint, _offline_checks, checkpoint_specs(weights)),
        _EVALUATED,
    ]
