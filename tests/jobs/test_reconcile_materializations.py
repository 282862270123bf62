"""Phases that are complete on disk but that Dagster was not told of."""

import dagster as dg

from rft_platform.experience.file_names import round_key
from rft_platform.jobs.reconcile_materializations import reconcile_materializations
from rft_platform.rounds.project.policy import Policy, publish
from rft_platform.rounds.project.project import Project

JUDGED = {"sound": True, "judge_version": "exact_match@1", "mean_reward": 0.25, "rows": 4}


def partitions(instance: dg.DagsterInstance, asset: str) -> set[str]:
    return set(instance.get_materialized_partitions(dg.AssetKey(asset)))


def test_what_its_note_says_is_recorded_once(project: Project) -> None:
    project.store.write_note(1, "judge", JUDGED)
    project.store.write_note(1, "evaluation", {"results": [], "metrics": {"sampled_pass": 0.5}, "promoted": True})
    publish(project.store, Policy("f", 3, "weights", round=0))
    project.store.write_note(0, "evaluation", {"results": [], "metrics": {}})
    phases = [("explore", 1), ("sync", 1), ("warm_start", 0)]
    with dg.DagsterInstance.ephemeral() as instance:
        said = reconcile_materializations(project, instance, phases)
        assert said == ["judged_experiences of r0001", "evaluation_report of r0001", "warm_start_checkpoint of r0000"]
        assert partitions(instance, "judged_experiences") == partitions(instance, "evaluation_report") == {"r0001"}
        event = instance.get_latest_materialization_event(dg.AssetKey("judged_experiences"))
        assert event is not None and event.asset_materialization is not None
        assert event.asset_materialization.metadata["mean_reward"].value == 0.25
        tags = event.asset_materialization.tags or {}
        assert tags["dagster/data_version"] == f"{project.store.digest(1)[:16]}+exact_match@1"
        warm = instance.get_latest_materialization_event(dg.AssetKey("warm_start_checkpoint"))
        assert warm is not None and warm.asset_materialization is not None
        assert (warm.asset_materialization.tags or {})["dagster/data_version"] == "weights"
        assert reconcile_materializations(project, instance, phases) == []


def test_what_is_not_complete_or_known_is_left_alone(project: Project) -> None:
    project.store.write_note(2, "judge", {**JUDGED, "sound": False})
    project.store.write_note(3, "judge", JUDGED)
    with dg.DagsterInstance.ephemeral() as instance:
        instance.report_runless_asset_event(
            dg.AssetMaterialization("judged_experiences", partition=round_key(3), metadata={"by": "its own run"})
        )
        assert (
            reconcile_materializations(project, instance, [("explore", 1), ("explore", 2), ("explore", 3), ("sync", 3)])
            == []
        )
        assert partitions(instance, "judged_experiences") == {"r0003"}
