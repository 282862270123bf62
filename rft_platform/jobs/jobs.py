"""The jobs of a project, the tags of their runs, and the round partitions in Dagster.

Jobs: the warm start, the two halves of a round, offline trainings, evaluation, judging, and releases.
"""

import dagster as dg

from rft_platform.assets.common import rft_rounds
from rft_platform.experience.file_names import is_round_key, round_key
from rft_platform.rounds.project.code_version import code_version
from rft_platform.rounds.project.project import Project

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
KIND_OF_JOB = {job: kind for kind, job in JOB_OF_KIND.items()}

_PARTITIONS = str(rft_rounds.name)

#: Run configuration of an evaluation in mode bench: evaluate in any case, and leave the champion unchanged.
BENCH = {"ops": {"evaluation_report": {"config": {"force": True, "promote": False}}}}

warm_start_job = dg.define_asset_job(
    "warm_start_job",
    selection=["task_dataset", "eval_task_dataset", "warm_start_checkpoint"],
    description="Read the tasks, make the starting policy (SFT where configured) and evaluate it.",
    tags={"rft/phase": "warm_start"},
)

explore_job = dg.define_asset_job(
    "explore_job",
    selection=["policy_snapshot", "rollout_batches", "judged_experiences"],
    description="First half of a round: roll out the policy on the round's tasks and judge the rollouts.",
    tags={"rft/phase": "explore"},
)

collect_job = dg.define_asset_job(
    "collect_job",
    selection=["online_experiences", "online_demonstrations", "judged_experiences"],
    description="Online, first half of a round: take committed production traffic and corrections, compute advantages.",
    tags={"rft/phase": "collect"},
)

sync_round_job = dg.define_asset_job(
    "sync_round_job",
    selection=["policy_checkpoint", "evaluation_report"],
    description="Second half of a round: train on the judged experiences, register, serve and evaluate the weights.",
    tags={"rft/phase": "sync"},
)

evaluate_job = dg.define_asset_job(
    "evaluate_job",
    selection=["evaluation_report"],
    description="Evaluate the policy of a round again; the champion moves if the gate passes.",
    tags={"rft/phase": "evaluate"},
)

judge_job = dg.define_asset_job(
    "judge_job",
    selection=["judged_experiences"],
    description="Judge stored rollouts again, with the configured judge or another one: a backfill over rounds.",
    tags={"rft/phase": "judge"},
)

sft_job = dg.define_asset_job(
    "sft_job",
    selection=["sft_dataset", "sft_checkpoint", "evaluation_report"],
    description="Supervised fine-tuning on a dataset of demonstrations; the weights are registered and evaluated.",
    tags={"rft/phase": "sft"},
)

dpo_job = dg.define_asset_job(
    "dpo_job",
    selection=["preference_pairs", "dpo_checkpoint", "evaluation_report"],
    description="Direct preference optimisation on a dataset of pairs; the weights are registered and evaluated.",
    tags={"rft/phase": "dpo"},
)

distill_job = dg.define_asset_job(
    "distill_job",
    selection=["sft_dataset", "distilled_checkpoint", "evaluation_report"],
    description="Distillation of a teacher's distribution on a dataset; the weights are registered and evaluated.",
    tags={"rft/phase": "distill"},
)

release_job = dg.define_asset_job(
    "release_job",
    selection=["release_report"],
    description="Online: report on the versions in production; the configuration may name a decision to make first.",
    tags={"rft/phase": "release"},
)

ALL_JOBS = [
    *(warm_start_job, explore_job, collect_job, sync_round_job, sft_job, dpo_job, distill_job),
    *(evaluate_job, judge_job, release_job),
]


def run_tags(round_number: int) -> dict[str, str]:
    """The tags of a Dagster run: its round and its code version."""
    return {"rft/round": round_key(round_number), "rft/code": code_version()}


def add_next_round(instance: dg.DagsterInstance, project: Project) -> None:
    """Add the partition after the newest round, so that it can be selected in the launchpad."""
    newest = max(project.store.rounds(), default=0)
    key = round_key(1 if project.settings.offline is not None else newest + 1)
    if not instance.has_dynamic_partition(_PARTITIONS, key):
        instance.add_dynamic_partitions(_PARTITIONS, [key])


def unknown_partitions(instance: dg.DagsterInstance) -> list[str]:
    """Partitions whose names are not rounds, for example because of a typing error."""
    return [key for key in instance.get_dynamic_partitions(_PARTITIONS) if not is_round_key(key)]
