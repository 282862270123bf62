"""Training asset: a round's optimiser steps and the resulting checkpoint, registered in MLflow."""

from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg

from rft_platform.assets.checks import CHECKPOINT_CHECKS, checkpoint_results
from rft_platform.assets.common import TRAINER_POOL, links, numbers, path, round_of, value_table
from rft_platform.assets.project_asset import ProjectAsset
from rft_platform.assets.run_failure import reports_faults
from rft_platform.common.policy_names import FIRST_POLICY
from rft_platform.experience.file_names import round_key
from rft_platform.resources.project import ProjectResource, RegistryResource, TrainerResource

if TYPE_CHECKING:
    from rft_platform.rounds.round import PolicyTraining


def selection_metadata(note: dict[str, Any] | None) -> dict[str, Any]:
    """Metadata of a training's row selection; empty if rows are not selected one by one."""
    if note is None:
        return {}
    versions = note["policy_versions"]
    return {
        "rows": value_table(
            {
                **note["rows"],
                "from_rounds": ", ".join(map(round_key, note["fresh_rounds"])) or "none",
                "policy_versions": f"{versions[0]} to {versions[1]}" if versions else "none",
                "left_for_later": sum(note["left"].values()),
            }
        ),
        **numbers({"rows/staleness_mean": note["staleness_mean"]}),
    }


_ORIGIN = ("judge_version", "data_digest", "taskset_digest", "config_digest", "code_version")  # `rft trace` shows more
#: Metrics that are entries by themselves, so that Dagster plots them over the rounds. A table has the others.
_HEADLINES = ("loss", "reward_mean", "grad_norm", "entropy", "mismatch_k3", "clip_fraction", "lr", "tokens")


def training_metadata(training: "PolicyTraining") -> dict[str, Any]:
    """Metadata of the training of one policy: what it made, the headline figures, and tables of everything else."""
    policy, result = training.policy, training.result
    figures = {} if result is None else numbers(result.metrics)
    found: dict[str, Any] = {
        "checkpoint": path(policy.folder),
        "policy_version": policy.policy_version,
        "model_version": policy.model_version or "not registered",
    }
    if result is not None:
        found |= {"optimizer_steps": result.steps, **{name: figures[name] for name in _HEADLINES if name in figures}}
        found["other_metrics"] = value_table({name: v for name, v in figures.items() if name not in _HEADLINES})
        found["seconds"] = value_table(numbers(result.seconds))
    found["origin"] = value_table({name: training.origin[name] for name in _ORIGIN if training.origin.get(name)})
    prefix = "" if policy.name == FIRST_POLICY else f"{policy.name}/"
    return {f"{prefix}{name}": value for name, value in found.items()}


@partial(
    ProjectAsset,
    group_name="training",
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
    """Weights after this round: HF safetensors, resumable trainer state, manifest with the lineage, model version."""
    from rft_platform.rounds.reporting.run_log import mlflow_links
    from rft_platform.rounds.round import Round
    from rft_platform.rounds.selection.pending_rows import selection_note
    from rft_platform.rounds.train import engine_mismatch

    opened, number = project.open(), round_of(context)
    versions = registry.connect()
    trained = Round(opened, number, context.run.run_id).train(trainer.connect(), versions)
    first = trained.pop(FIRST_POLICY)
    assert first.result is not None, "the first policy is always trained"
    metadata: dict[str, Any] = {**links(mlflow_links(opened, versions, first.policy))}
    metadata |= training_metadata(first) | selection_metadata(selection_note(opened.store, number))
    for other in trained.values():
        metadata |= training_metadata(other)
    return dg.MaterializeResult(
        metadata={**metadata, "no_op": first.result.steps == 0},
        data_version=dg.DataVersion(first.policy.weights_digest),
        check_results=checkpoint_results(first.result.steps, engine_mismatch(first.steps)),
    )
