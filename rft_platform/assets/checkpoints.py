"""Training asset: a round's optimiser steps and the resulting checkpoint, registered in MLflow."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from rft_platform.assets.checks import CHECKPOINT_CHECKS, checkpoint_results
from rft_platform.assets.common import OWNERS, TRAINER_POOL, numbers, path, rft_rounds, round_of
from rft_platform.assets.run_failure import reports_faults
from rft_platform.experience.file_names import round_key
from rft_platform.resources import ProjectResource, RegistryResource, TrainerResource

if TYPE_CHECKING:
    from rft_platform.rounds.project.policy import Policy
    from rft_platform.training.protocol import TrainResult


def selection_metadata(note: dict[str, Any] | None) -> dict[str, Any]:
    """Metadata of a training's row selection; empty if rows are not selected one by one."""
    if note is None:
        return {}
    versions = note["policy_versions"]
    return {
        **{f"rows/{use}": count for use, count in note["rows"].items()},
        "rows/from_rounds": ", ".join(map(round_key, note["fresh_rounds"])) or "none",
        "rows/policy_versions": f"{versions[0]} to {versions[1]}" if versions else "none",
        "rows/staleness_mean": note["staleness_mean"],
        "rows/left_for_later": sum(note["left"].values()),
    }


def further_metadata(trained: "Mapping[str, tuple[Policy, TrainResult | None]]") -> dict[str, Any]:
    """Metadata of the further policies of a training."""
    found: dict[str, Any] = {}
    for name, (policy, result) in trained.items():
        found |= {
            f"{name}/checkpoint": path(policy.folder),
            f"{name}/policy_version": policy.policy_version,
            f"{name}/model_version": policy.model_version or "not registered",
        }
        if result is not None:
            measured = {"optimizer_steps": result.steps, **numbers(result.metrics)}
            found |= {f"{name}/{metric}": value for metric, value in measured.items()}
    return found


@dg.asset(
    partitions_def=rft_rounds,
    group_name="training",
    owners=OWNERS,
    kinds={"pytorch", "safetensors", "mlflow"},
    deps=["judged_experiences", "online_demonstrations"],
    pool=TRAINER_POOL,
    check_specs=CHECKPOINT_CHECKS,
)
@reports_faults
def policy_checkpoint(
    context: dg.AssetExecutionContext,
    project: ProjectResource,
    trainer: TrainerResource,
    registry: RegistryResource,
) -> dg.MaterializeResult:
    """Weights after this round: HF safetensors, resumable state, a manifest with their lineage, a model version."""
    from rft_platform.rounds.round import Round
    from rft_platform.rounds.selection.pending_rows import selection_note
    from rft_platform.rounds.train import engine_mismatch

    opened, number = project.open(), round_of(context)
    training = Round(opened, number, context.run.run_id).train(trainer.connect(), registry.connect())
    policy, result = training.policy, training.result
    return dg.MaterializeResult(
        metadata={
            "checkpoint": path(policy.folder),
            "policy_version": policy.policy_version,
            "model_version": policy.model_version or "not registered",
            "optimizer_steps": result.steps,
            "no_op": result.steps == 0,
            **selection_metadata(selection_note(opened.store, number)),
            **numbers(result.metrics),
            **{f"seconds/{name}": value for name, value in result.seconds.items()},
            **further_metadata(training.further),
        },
        data_version=dg.DataVersion(policy.weights_digest),
        check_results=checkpoint_results(result.steps, engine_mismatch(training.steps)),
    )
