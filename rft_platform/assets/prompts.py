"""The asset of the prompt search: what a better system prompt gives without training."""

from functools import partial

import dagster as dg

from rft_platform.assets.common import ENGINE_POOL, ProjectAsset, path
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import EngineResource, ProjectResource, RegistryResource


@partial(
    ProjectAsset,
    group_name="evaluation",
    kinds={"report", "mlflow"},
    deps=["task_dataset", "eval_task_dataset", "warm_start_checkpoint"],
    pool=ENGINE_POOL,
    each_round=False,
)
@reports_faults
def optimised_prompt(
    context: dg.AssetExecutionContext, project: ProjectResource, engine: EngineResource, registry: RegistryResource
) -> dg.MaterializeResult:
    """A better system prompt for the starting weights, by the section `prompt_search`, compared with the training."""
    from rft_platform.common.files import digest_json
    from rft_platform.rounds.prompt_search import optimise_prompt
    from rft_platform.rounds.reporting.prompt_report import headline, prompt_page

    opened = project.open()
    result = optimise_prompt(opened, engine.connect(opened), registry.connect(opened))
    return dg.MaterializeResult(
        metadata={
            "summary": headline(opened, result),
            "report": dg.MetadataValue.md(prompt_page(opened, result)),
            "prompt": dg.MetadataValue.text(result.best.text),
            "registered_as": result.address or "nothing: no better prompt was found",
            "gate": result.decision.reason,
            "better": result.decision.passed,
            "runs": result.runs,
            "folder": path(opened.home.prompts),
            **result.lineage,
        },
        data_version=dg.DataVersion(digest_json(result.best.text)),
    )
