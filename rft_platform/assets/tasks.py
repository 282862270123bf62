"""Assets of the tasks: the tasks to explore, and the held-out tasks."""

from functools import partial

import dagster as dg

from rft_platform.assets.checks import leak_result, leak_spec
from rft_platform.assets.common import ProjectAsset, path, report_table
from rft_platform.assets.run_failure import reports_faults
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.project.project import Project
from rft_platform.tasks.task import ORIGIN, Task


@partial(
    ProjectAsset,
    group_name="tasks",
    kinds={"dataset"},
    deps=["imported_traces"],
    each_round=False,
)
@reports_faults
def task_dataset(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    """Tasks to explore, checked for empty and duplicate rows. The asset's data version is a digest of the tasks."""
    opened = project.open()
    if not opened.config.buffer.explorer_input.explored:
        return dg.MaterializeResult(metadata={"dagster/row_count": 0, "source": "none: nothing is explored"})
    dataset, reports = opened.tasks, [each.report for each in opened.datasets.values()]
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": explored_count(opened),
            "source": path(reports[0].source) if len(reports) == 1 else ", ".join(each.source for each in reports),
            "report": report_table(reports),
            "sample": dg.MetadataValue.json([task.raw for task in dataset.tasks[:3] if ORIGIN not in task.raw]),
        },
        data_version=dg.DataVersion(dataset.digest),
    )


@partial(
    ProjectAsset,
    group_name="tasks",
    kinds={"dataset"},
    deps=["task_dataset", "imported_traces"],
    check_specs=[leak_spec("eval_task_dataset", "No held-out task is explored.", each_round=False)],
    each_round=False,
)
@reports_faults
def eval_task_dataset(context: dg.AssetExecutionContext, project: ProjectResource) -> dg.MaterializeResult:
    """Held-out tasks, and whether any of them is also explored (a leak)."""
    opened = project.open()
    datasets, leaks = [dataset for _, dataset in opened.eval_tasks], held_out_leaks(opened)
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": sum(len(dataset.tasks) for dataset in datasets),
            "leaks": len(leaks),
            "report": report_table([dataset.report for dataset in datasets]),
        },
        data_version=dg.DataVersion(held_out_version(opened)),
        check_results=[leak_result(leaks)],
    )


def held_out_leaks(project: Project) -> list[Task]:
    """The held-out tasks that are also explored."""
    from rft_platform.tasks.dataset import find_leaks

    explored = project.tasks.tasks if project.config.buffer.explorer_input.explored else ()
    return [
        task
        for taskset, dataset in project.eval_tasks
        for task in find_leaks(explored, dataset.tasks, whole_rows=taskset.reads_rows)
    ]


def explored_count(project: Project) -> int:
    """The number of tasks to explore."""
    return len(project.tasks.tasks) if project.config.buffer.explorer_input.explored else 0


def held_out_version(project: Project) -> str:
    """The data version of the held-out tasks."""
    return "+".join(dataset.digest for _, dataset in project.eval_tasks) or "none"
