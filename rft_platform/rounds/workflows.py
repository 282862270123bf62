"""Resolve the workflow of a taskset as configured: in this process, or in worker processes."""

from rft_platform.config.buffer import Taskset
from rft_platform.rollout.class_style import FormatArgs
from rft_platform.rollout.workflow import WorkerWorkflow, Workflow, resolve_workflow
from rft_platform.rounds.project import Project

_BATCHED = "single_turn"  # one engine call for the whole batch: no user code to isolate


def workflow_of(project: Project, taskset: Taskset) -> Workflow:
    """The workflow of ``taskset``. A worker workflow is not imported here: this environment may lack its packages.

    Raises UserError if a workflow for this process cannot be loaded.
    """
    workers = project.config.explorer.workers
    if workers.kind == "inprocess" or taskset.workflow == _BATCHED:
        return _resolved(taskset)
    return WorkerWorkflow(
        taskset.workflow,
        taskset.workflow_args,
        _format_args(taskset),
        taskset.reward_fn_args,
        workers.python,
        workers.count,
        project.home.logs,
    )


def check_workflow(project: Project, taskset: Taskset) -> None:
    """Raise UserError if the workflow cannot be loaded. One of another environment is only loaded at its start."""
    workers = project.config.explorer.workers
    if workers.kind == "inprocess" or workers.python is None:
        _resolved(taskset)


def _resolved(taskset: Taskset) -> Workflow:
    return resolve_workflow(
        taskset.workflow,
        taskset.workflow_args,
        format_args=_format_args(taskset),
        reward_fn_args=taskset.reward_fn_args,
    )


def _format_args(taskset: Taskset) -> FormatArgs:
    keys = taskset.format
    return FormatArgs(keys.prompt_key, keys.response_key, keys.system_prompt)
