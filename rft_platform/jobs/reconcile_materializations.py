"""Reconcile Dagster with the disk: report assets of launches that finished but were killed before reporting them.

Milliseconds pass between a launch's last note and Dagster's record of the asset. A process killed in that time has done
its work and the plan continues from it, but the lineage would lack a link.
"""

from collections.abc import Iterable
from typing import Any

import dagster as dg

from rft_platform.assets.common import numbers
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.notes import EVALUATION, JUDGE
from rft_platform.rounds.project.policy import published
from rft_platform.rounds.project.project import Project

#: The last asset of each kind of launch, and that asset's note. Kinds without an entry end in an evaluation.
_ENDS = {"explore": ("judged_experiences", JUDGE), "warm_start": ("warm_start_checkpoint", EVALUATION)}
_EVALUATED = ("evaluation_report", EVALUATION)


def reconcile_materializations(
    project: Project, instance: dg.DagsterInstance, launched: Iterable[tuple[str, int]]
) -> list[str]:
    """Report the last asset of each of ``launched`` (kind, round) that is complete on disk and unknown to Dagster.

    Intended for launches whose newest run failed, because Dagster knows those of successful runs. Returns what was
    reported.
    """
    reported = []
    for kind, number in launched:
        if kind == "evaluate":  # the existing note is from an evaluation before the failed one
            continue
        asset, name = _ENDS.get(kind, _EVALUATED)
        note = project.store.read_note(number, name)
        if note is None or (name == JUDGE and not note["sound"]) or _is_known(instance, asset, number):
            continue
        instance.report_runless_asset_event(_materialization(project, asset, number, note))
        reported.append(f"{asset} of {round_key(number)}")
    return reported


def _is_known(instance: dg.DagsterInstance, asset: str, number: int) -> bool:
    key = dg.AssetKey(asset)
    if number == 0:
        return instance.get_latest_materialization_event(key) is not None
    return round_key(number) in instance.get_materialized_partitions(key)


def _materialization(project: Project, asset: str, number: int, note: dict[str, Any]) -> dg.AssetMaterialization:
    version = _data_version(project, asset, number, note)
    return dg.AssetMaterialization(
        asset_key=asset,
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
