"""The jobs of a project, the tags of their runs, and the round partitions in Dagster.

Jobs: the warm start, the two halves of a round, offline trainings, evaluation, judging, and releases.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import dagster as dg

from rft_platform.config.resolve import OfflineKind
from rft_platform.experience.file_names import is_round_key, round_key
from rft_platform.resources.names import PLAIN_NAMES, DagsterNames
from rft_platform.rounds.project.code_version import code_version
from rft_platform.rounds.project.project import Project

UnresolvedJob: TypeAlias = Any  # Dagster does not export the type of what ``define_asset_job`` returns

#: The plain name of the job of each kind of launch.
JOB_OF_KIND = {
    "warm_start": "warm_start_job",
    "explore": "explore_job",
    "collect": "collect_job",
    "sync": "sync_round_job",
    "evaluate": "evaluate_job",
    "sft": "sft_job",
    "dpo": "dpo_job",
    "distill": "distill_job",
}
#: The assets of each kind of offline training: its dataset and its weights.
OFFLINE_ASSETS: dict[OfflineKind, tuple[str, str]] = {
    "sft": ("sft_dataset", "sft_checkpoint"),
    "dpo": ("preference_pairs", "dpo_checkpoint"),
    "distill": ("sft_dataset", "distilled_checkpoint"),
}
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
_PHASES = {"sync_round_job": "sync"}  # of jobs whose name is not that of their phase


@dataclass(frozen=True, slots=True)
class _Job:
    """A job of a project, with plain names."""

    name: str
    assets: Sequence[str]
    description: str


_JOBS = [
    _Job(
        "warm_start_job",
        ["task_dataset", "eval_task_dataset", "warm_start_checkpoint"],
        "Read the tasks, make the starting policy (SFT where configured) and evaluate it.",
    ),
    _Job(
        "explore_job",
        ["policy_snapshot", "rollout_batches", "judged_experiences"],
        "First half of a round: roll out the policy on the round's tasks and judge the rollouts.",
    ),
    _Job(
        "collect_job",
        ["online_experiences", "online_demonstrations", "judged_experiences"],
        "Online, first half of a round: take committed production traffic and corrections, compute advantages.",
    ),
    _Job(
        "sync_round_job",
        ["policy_checkpoint", "evaluation_report"],
        "Second half of a round: train on the judged experiences, register, serve and evaluate the weights.",
    ),
    _Job(
        "evaluate_job",
        ["evaluation_report"],
        "Evaluate the policy of a round again; the champion moves if the gate passes.",
    ),
    _Job(
        "judge_job",
        ["judged_experiences"],
        "Judge stored rollouts again, with the configured judge or another one: a backfill over rounds.",
    ),
    _Job(
        "prompt_job",
        ["optimised_prompt"],
        "Search for a better system prompt for the starting weights, and compare it with the training.",
    ),
    _Job(
        "sft_job",
        [*OFFLINE_ASSETS["sft"], "evaluation_report"],
        "Supervised fine-tuning on a dataset of demonstrations; the weights are registered and evaluated.",
    ),
    _Job(
        "dpo_job",
        [*OFFLINE_ASSETS["dpo"], "evaluation_report"],
        "Direct preference optimisation on a dataset of pairs; the weights are registered and evaluated.",
    ),
    _Job(
        "distill_job",
        [*OFFLINE_ASSETS["distill"], "evaluation_report"],
        "Distillation of a teacher's distribution on a dataset; the weights are registered and evaluated.",
    ),
    _Job(
        "release_job",
        ["release_report"],
        "Online: report on the versions in production; the configuration may name a decision to make first.",
    ),
]
#: Plain names of the jobs in which assets are made.
JOBS = tuple(job.name for job in _JOBS)


def asset_jobs(names: DagsterNames, chosen: Collection[str] = JOBS) -> dict[str, UnresolvedJob]:
    """The jobs of a project with the plain names ``chosen``, by plain name.

    Each runs in one process: the engine and trainer processes do the heavy work, and a process for each step would only
    add seconds to a round.
    """
    return {
        job.name: dg.define_asset_job(
            names.name(job.name),
            selection=dg.AssetSelection.assets(*map(names.key, job.assets)),
            description=job.description,
            tags={"rft/phase": _PHASES.get(job.name, job.name.removesuffix("_job")), "rft/job": names.name(job.name)},
            executor_def=dg.in_process_executor,
        )
        for job in _JOBS
        if job.name in chosen
    }


def kinds_by_job(names: DagsterNames) -> dict[str, str]:
    """The kind of launch of each job that the plan launches, by the job's name in Dagster."""
    return {names.name(job): kind for kind, job in JOB_OF_KIND.items()}


def evaluation_config(names: DagsterNames, *, force: bool = True, promote: bool = True) -> dict[str, Any]:
    """The run configuration of an evaluation; mode bench evaluates in any case and leaves the champion unchanged."""
    return {"ops": {names.name("evaluation_report"): {"config": {"force": force, "promote": promote}}}}


def run_tags(round_number: int) -> dict[str, str]:
    """The tags of a Dagster run: its round and its code version, whose commit is shortened to fit a line."""
    return {"rft/round": round_key(round_number), "rft/code": _COMMIT.sub(r"\1", code_version())}


def add_rounds(instance: dg.DagsterInstance, project: Project, names: DagsterNames = PLAIN_NAMES) -> None:
    """Add the partitions of all rounds that have begun, and of the next one, so that it can be selected in the UI.

    A round beyond the budget is not added: nothing would ever make it.
    """
    begun = [number for number in project.store.rounds() if number]
    following = [number for number in [max(begun, default=0) + 1] if number <= project.rounds_budget]
    name = str(names.rounds.name)
    known = set(instance.get_dynamic_partitions(name))
    added = [key for key in map(round_key, [*begun, *following]) if key not in known]
    if added:
        instance.add_dynamic_partitions(name, added)


def unknown_partitions(instance: dg.DagsterInstance) -> list[str]:
    """Partitions of a home's own instance whose names are not rounds, for example because of a typing error."""
    return [key for key in instance.get_dynamic_partitions(str(PLAIN_NAMES.rounds.name)) if not is_round_key(key)]
