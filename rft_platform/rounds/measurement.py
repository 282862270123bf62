"""What a held-out taskset is measured by: results of different judges, workflows or sampling are not compared."""

from dataclasses import asdict

from rft_platform.config.buffer import Taskset
from rft_platform.files import digest_json
from rft_platform.rounds.explore import sampling_of
from rft_platform.rounds.judge import judge_of
from rft_platform.rounds.project import Project


def measured_by(project: Project, taskset: Taskset) -> str:
    """Digest of the judge's version, the workflow with all that it is given, and the sampling.

    Of a workflow its reference and its arguments count, not its source code: that may belong to another environment.
    How often tasks are run is no part of it. Raises UserError where the judge cannot be loaded.
    """
    judge = judge_of(project, taskset)
    return digest_json(
        {
            "judge": None if judge is None else judge.version,
            "workflow": taskset.workflow,
            "workflow_args": taskset.workflow_args,
            "reward_fn_args": taskset.reward_fn_args,
            "format": taskset.format.model_dump(mode="json"),
            "sampling": asdict(sampling_of(project, taskset)),
        }
    )[:16]
