"""Dagster's ``Definitions``: assets, jobs, sensors, schedules and the resources that they use."""

import multiprocessing

import dagster as dg

from rft_platform.assets import (
    checkpoints,
    evaluation,
    experiences,
    offline,
    offline_data,
    online,
    policy,
    releases,
    rollouts,
    tasks,
)
from rft_platform.common.processes.gc_control import keep_imports
from rft_platform.common.user_code import drop_safe_path
from rft_platform.jobs.alerts import alert_on_run_failure
from rft_platform.jobs.jobs import ALL_JOBS
from rft_platform.jobs.maintenance import MAINTENANCE_JOBS
from rft_platform.jobs.sensors import experience_threshold_sensor, next_round_sensor, nightly_evaluation
from rft_platform.resources import EngineResource, ProjectResource, RegistryResource, TrainerResource

project = ProjectResource()

defs = dg.Definitions(
    assets=[
        tasks.task_dataset,
        tasks.eval_task_dataset,
        policy.base_model,
        policy.warm_start_checkpoint,
        policy.policy_snapshot,
        rollouts.rollout_batches,
        online.online_experiences,
        online.online_demonstrations,
        experiences.judged_experiences,
        checkpoints.policy_checkpoint,
        offline_data.sft_dataset,
        offline_data.preference_pairs,
        offline.teacher_model,
        offline.sft_checkpoint,
        offline.dpo_checkpoint,
        offline.distilled_checkpoint,
        evaluation.evaluation_report,
        releases.release_report,
    ],
    jobs=[*ALL_JOBS, *MAINTENANCE_JOBS],
    sensors=[next_round_sensor, experience_threshold_sensor, alert_on_run_failure],
    schedules=[nightly_evaluation],
    resources={
        "project": project,
        "engine": EngineResource(project=project),
        "trainer": TrainerResource(project=project),
        "registry": RegistryResource(project=project),
    },
    # The engine and trainer processes do the heavy work. One process per step would only add seconds to every round.
    executor=dg.in_process_executor,
)

if multiprocessing.parent_process() is not None:  # a process of a Dagster run, which has loaded no user code yet
    keep_imports()
    drop_safe_path()
