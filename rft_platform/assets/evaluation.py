"""Evaluation asset: held-out pass rates, the gate, promotion, and a readable report."""

from functools import partial

import dagster as dg
from pydantic import Field

from rft_platform.assets.checks import EVALUATION_CHECKS, evaluation_results
from rft_platform.assets.common import ENGINE_POOL, ProjectAsset, links, numbers, path, report_table, round_of
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import EngineResource, ProjectResource, RegistryResource


class EvaluationConfig(dg.Config):
    """Evaluation options of this run."""

    force: bool = Field(default=False, description="Evaluate even if the configured interval has not passed.")
    promote: bool = Field(default=True, description="Promote the policy to champion if the gate passes.")


@partial(
    ProjectAsset,
    group_name="evaluation",
    kinds={"report", "mlflow"},
    deps=["policy_checkpoint", "sft_checkpoint", "dpo_checkpoint", "distilled_checkpoint", "eval_task_dataset"],
    pool=ENGINE_POOL,
    check_specs=EVALUATION_CHECKS,
)
@reports_faults
def evaluation_report(
    context: dg.AssetExecutionContext,
    config: EvaluationConfig,
    project: ProjectResource,
    engine: EngineResource,
    registry: RegistryResource,
) -> dg.MaterializeResult:
    """Held-out results of the round's policy, compared with the champion. The engine that measures then serves it."""
    from rft_platform.rounds.offline import evaluate_offline
    from rft_platform.rounds.project.record import required
    from rft_platform.rounds.reporting.bench import write_bench
    from rft_platform.rounds.reporting.reward_audit import audit_evaluation
    from rft_platform.rounds.reporting.run_log import mlflow_links
    from rft_platform.rounds.round import Round

    opened, number = project.open(), round_of(context)
    versions = registry.connect(opened)
    if opened.settings.offline:
        summary = evaluate_offline(opened, engine.connect, versions, number, force=config.force, promote=config.promote)
    else:
        summary = Round(opened, number).evaluate(
            engine.connect(opened), versions, force=config.force, promote=config.promote
        )
    policy = required(opened.store, number)
    return dg.MaterializeResult(
        metadata={
            **({"learning_curve": dg.MetadataValue.md(summary.curve)} if summary.curve else {}),
            "report": dg.MetadataValue.md(summary.markdown),
            "gate": summary.gate,
            "promoted": summary.promoted,
            **(links(mlflow_links(opened, versions, policy)) if summary.results else {}),
            **({"compared_with": report_table(summary.compared)} if summary.compared else {}),
            **({} if config.promote else {"all_policies": path(write_bench(opened))}),
            **numbers(summary.metrics),
        },
        check_results=evaluation_results(
            summary.gate_passed, summary.gate, summary.regression, audit_evaluation(opened, number)
        ),
    )
