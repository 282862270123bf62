"""The jobs of a project: the warm start, the two halves of a round, offline trainings, evaluation and judging."""

import dagster as dg

JOB_OF_KIND = {
    "warm_start": "warm_start_job",
    "explore": "explore_job",
    "sync": "sync_round_job",
    "evaluate": "evaluate_job",
    "sft": "sft_job",
    "dpo": "dpo_job",
    "distill": "distill_job",
}
KIND_OF_JOB = {job: kind for kind, job in JOB_OF_KIND.items()}

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
    description="First half of a round: roll the policy out on the round's tasks and judge what it did.",
    tags={"rft/phase": "explore"},
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

OFFLINE_JOBS = [sft_job, dpo_job, distill_job]
ALL_JOBS = [warm_start_job, explore_job, sync_round_job, *OFFLINE_JOBS, evaluate_job, judge_job]
