"""The asset of imported traces: an import is a partition, whose datasets offline trainings and rounds read."""

from functools import partial
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from rft_platform.assets.common import ProjectAsset, path, report_table, value_table
from rft_platform.assets.run_failure import reports_faults
from rft_platform.config.home import Home
from rft_platform.resources.project import ProjectResource

if TYPE_CHECKING:
    from rft_platform.traces.imports import ImportReport


class ImportConfig(dg.Config):
    """What to import. The partition is the name of the import."""

    format: str = Field(description="langfuse, langsmith, mlflow or otel.")
    source: str = Field(description="An exported file, a folder of them, or MLflow's tracking URI.")
    experiment: str | None = Field(default=None, description="MLflow: the experiment with the traces.")
    link: str | None = Field(default=None, description="Address of a trace's page, with {id} in place of its id.")
    score: str | None = Field(default=None, description="The score that compares answers, if there are several.")
    min_score: float | None = Field(default=None, description="Answers with a lower score are no demonstrations.")


@partial(
    ProjectAsset,
    group_name="tasks",
    kinds={"dataset", "json"},
    each_import=True,
)
@reports_faults
def imported_traces(
    context: dg.AssetExecutionContext, config: ImportConfig, project: ProjectResource
) -> dg.MaterializeResult:
    """Traces of MLflow, OpenTelemetry, Langfuse or LangSmith as tasks, demonstrations and preference pairs."""
    from rft_platform.traces.datasets import ScoreRule
    from rft_platform.traces.imports import ImportRequest, Imports, redaction_for

    opened = project.open()
    score_rule = ScoreRule(config.score, config.min_score)
    request = ImportRequest(
        context.partition_key, config.format, config.source, config.experiment, config.link, score_rule
    )
    report = Imports(opened.home).run(request, redaction_for(opened.config.service.redaction))
    return dg.MaterializeResult(
        metadata=import_metadata(opened.home, report), data_version=dg.DataVersion(report.digest)
    )


def import_metadata(home: Home, report: "ImportReport") -> dict[str, Any]:
    """What Dagster shows of an import. No text of a trace: `rft forget` could not erase it there."""
    return {
        "dagster/partition_row_count": sum(report.rows.values()),
        "traces": report.imported,
        **report.rows,
        "known": sum(report.known.values()),
        "forgotten": report.forgotten,
        "redacted": report.redacted,
        "bad": report.bad,
        "bad_traces": report_table(report.bad_traces),
        "scores": value_table(report.scores),
        "format": report.format,
        "source": report.source,
        "folder": path(home.imports),
    }
