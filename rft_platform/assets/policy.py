"""Assets of the weights: base model, warm start, the snapshot that explores, and the checkpoint that a round trains."""

from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg

from rft_platform.assets.checks import CHECKPOINT_CHECKS, checkpoint_results
from rft_platform.assets.common import OWNERS, TRAINER_POOL, ProjectAsset, links, numbers, path, round_of, value_table
from rft_platform.assets.run_failure import reports_faults
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.file_names import round_key
from rft_platform.resources.project import EngineResource, ProjectResource, RegistryResource, TrainerResource

if TYPE_CHECKING:
    from rft_platform.rounds.project.record import Policy, RowSelection, Trained


base_model = dg.AssetSpec(
    "base_model",
    description="The model the project starts from: a folder, a Hugging Face name or a registered version.",
    group_name="policy",
    owners=OWNERS,
    kinds={"huggingface"},
)


@partial(
    ProjectAsset,
    group_name="policy",
    kinds={"pytorch", "safetensors"},
    deps=["base_model", "task_dataset", "eval_task_dataset", "imported_traces"],
    pool=TRAINER_POOL,
    each_round=False,
)
@reports_faults
def warm_start_checkpoint(
    context: dg.AssetExecutionContext,
    project: ProjectResource,
    engine: EngineResource,
    trainer: TrainerResource,
    registry: RegistryResource,
) -> dg.MaterializeResult:
    """The starting policy: the base model, fine-tuned on demonstrations if configured, then evaluated."""
    from rft_platform.rounds.evaluate import evaluate_round
    from rft_platform.rounds.warm_start import make_starting_policy

    opened = project.open()
    policy = make_starting_policy(opened, engine.connect, trainer.connect, context.run.run_id)
    evaluation = evaluate_round(opened, engine.connect(opened), registry.connect(opened), policy.round)
    return dg.MaterializeResult(
        metadata={
            "checkpoint": path(policy.folder),
            "weights_digest": policy.weights_digest,
            "report": dg.MetadataValue.md(evaluation.markdown),
            **numbers(evaluation.metrics),
        },
        data_version=dg.DataVersion(policy.weights_digest),
    )


@partial(
    ProjectAsset,
    group_name="policy",
    kinds={"safetensors"},
    deps=["base_model", "warm_start_checkpoint"],
)
@reports_faults
def policy_snapshot(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    """The weights this round explores with: the newest policy that the sync style permits, read at run time.

    The edge back from ``policy_checkpoint`` is not declared, because an asset graph must not contain cycles.
    """
    from rft_platform.rounds.project.policy import explored_with
    from rft_platform.rounds.round import Round

    opened, number = project.open(), round_of(context)
    policy = Round(opened, number).snapshot()
    others = {name: each for name, each in explored_with(opened, number).items() if name != policy.name}
    return dg.MaterializeResult(
        metadata={
            "checkpoint": path(policy.folder),
            "policy_version": policy.policy_version,
            "from_round": policy.round,
            "model_version": policy.model_version or "not registered",
            "weights_digest": policy.weights_digest,
            **{f"{name}/policy_version": one.policy_version for name, one in others.items()},
            **{f"{name}/checkpoint": path(one.folder) for name, one in others.items()},
        },
        data_version=dg.DataVersion(policy.weights_digest),
    )


def selection_metadata(selection: "RowSelection") -> dict[str, Any]:
    """Metadata of a training's row selection."""
    versions = selection.policy_versions
    return {
        "rows": value_table(
            {
                **selection.rows,
                "from_rounds": ", ".join(map(round_key, selection.fresh_rounds)) or "none",
                "policy_versions": f"{versions[0]} to {versions[1]}" if versions else "none",
                "left_for_later": sum(selection.left.values()),
            }
        ),
        **numbers({"rows/staleness_mean": selection.staleness_mean}),
    }


_ORIGIN = ("judge_version", "data_digest", "taskset_digest", "config_digest", "code_version")  # `rft trace` shows more
#: Metrics that are entries by themselves, so that Dagster plots them over the rounds. A table has the others.
_HEADLINES = ("loss", "reward_mean", "grad_norm", "entropy", "mismatch_k3", "clip_fraction", "lr", "tokens")


def training_metadata(policy: "Policy", trained: "Trained | None") -> dict[str, Any]:
    """Metadata of the training of one policy: what it made, the headline figures, and tables of everything else."""
    figures = {} if trained is None else numbers(trained.metrics)
    found: dict[str, Any] = {
        "checkpoint": path(policy.folder),
        "policy_version": policy.policy_version,
        "model_version": policy.model_version or "not registered",
    }
    if trained is not None:
        found |= {"optimizer_steps": trained.steps, **{name: figures[name] for name in _HEADLINES if name in figures}}
        found["other_metrics"] = value_table({name: v for name, v in figures.items() if name not in _HEADLINES})
        found["seconds"] = value_table(numbers(trained.seconds))
    origin = {} if trained is None else trained.lineage
    found["origin"] = value_table({name: origin[name] for name in _ORIGIN if origin.get(name)})
    prefix = "" if policy.name == DEFAULT_POLICY else f"{policy.name}/"
    return {f"{prefix}{name}": value for name, value in found.items()}


@partial(
    ProjectAsset,
    group_name="training",
    kinds={"pytorch", "safetensors", "mlflow"},
    deps=["judged_experiences", "online_demonstrations", "imported_traces"],
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
    from rft_platform.rounds.project.record import RowSelection
    from rft_platform.rounds.reporting.run_log import mlflow_links
    from rft_platform.rounds.round import Round

    opened, number = project.open(), round_of(context)
    versions = registry.connect(opened)
    made = Round(opened, number, context.run.run_id).train(trainer.connect(opened), versions)
    policy, first = made[DEFAULT_POLICY].policy, made[DEFAULT_POLICY].trained
    assert first is not None, "the default policy is always trained"
    metadata: dict[str, Any] = {**links(mlflow_links(opened, versions, policy))}
    metadata |= selection_metadata(made[DEFAULT_POLICY].selection or RowSelection())
    for each in made.values():
        metadata |= training_metadata(each.policy, each.trained)
    return dg.MaterializeResult(
        metadata={**metadata, "no_op": first.steps == 0},
        data_version=dg.DataVersion(policy.weights_digest),
        check_results=checkpoint_results(first.steps, first.engine_mismatch),
    )
