"""Assets of the policy: the starting weights, and the weights that a round explores with."""

from functools import partial

import dagster as dg

from rft_platform.assets.common import TRAINER_POOL, numbers, path, round_of
from rft_platform.assets.project_asset import OWNERS, ProjectAsset
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import EngineResource, ProjectResource, RegistryResource, TrainerResource

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
    deps=["base_model", "task_dataset", "eval_task_dataset"],
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
    evaluation = evaluate_round(opened, engine.connect(), registry.connect(), policy.round)
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
