"""Identity of an evaluation method: results of different judges, workflows or sampling are not compared."""

from dataclasses import asdict

from rft_platform.config.buffer import Taskset
from rft_platform.files import digest_json
from rft_platform.rounds.explore import sampling_of
from rft_platform.rounds.judge import judge_of
from rft_platform.rounds.project import Project


def measured_by(project: Project, taskset: Taskset) -> str:
    """Digest of the judge's version, the workflow with its arguments, and the sampling parameters.

    The workflow counts by its reference and arguments, not its source code, which may belong to another environment.
    The number of runs per task does not count. Raises UserError if the judge cannot be loaded.
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
