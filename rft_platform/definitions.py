"""Dagster's ``Definitions``: assets, jobs, sensors, schedules and the resources that they use.

The code location has those that the project in RFT_HOME uses: an asset that nothing makes would stay "missing" for
ever. ``rft run`` launches jobs itself and takes ``all_definitions``, and so does a code location without a project.
"""

import logging
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

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
from rft_platform.common.errors import RftError
from rft_platform.common.processes.gc_control import keep_imports
from rft_platform.common.user_code import drop_safe_path
from rft_platform.config.gpu_placement import engine_kind, gpu_count
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.config.resolve import offline_without_plugins
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.jobs.alerts import alert_on_run_failure
from rft_platform.jobs.jobs import ALL_JOBS
from rft_platform.jobs.maintenance import MAINTENANCE_JOBS
from rft_platform.jobs.sensors import evaluation_schedule, experience_threshold_sensor, next_round_sensor
from rft_platform.resources import EngineResource, ProjectResource, RegistryResource, TrainerResource
from rft_platform.rounds.project.code_version import code_of, code_version

LOG = logging.getLogger(__name__)
_Asset = dg.AssetsDefinition | dg.AssetSpec

project = ProjectResource()
_RESOURCES = {
    "project": project,
    "engine": EngineResource(project=project),
    "trainer": TrainerResource(project=project),
    "registry": RegistryResource(project=project),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """The assets and jobs of one kind of project, beside its evaluation."""

    assets: Sequence[_Asset]
    jobs: Sequence[str]
    rounds: bool = True  # whether a sensor starts the second half of rounds


_START: list[_Asset] = [tasks.task_dataset, tasks.eval_task_dataset, policy.base_model]
_TRAINED: list[_Asset] = [experiences.judged_experiences, checkpoints.policy_checkpoint]
_ROUNDS = _Part(
    [*_START, policy.warm_start_checkpoint, policy.policy_snapshot, rollouts.rollout_batches, *_TRAINED],
    ["warm_start_job", "explore_job", "sync_round_job", "judge_job"],
)
_ONLINE = _Part(
    [
        *(*_START, policy.warm_start_checkpoint, online.online_experiences, online.online_demonstrations),
        *(*_TRAINED, releases.release_report),
    ],
    ["warm_start_job", "collect_job", "sync_round_job", "judge_job", "release_job"],
)
_HELD_OUT: list[_Asset] = [tasks.eval_task_dataset, policy.base_model]
_OFFLINE = {
    "sft": _Part([*_HELD_OUT, offline_data.sft_dataset, offline.sft_checkpoint], ["sft_job"], rounds=False),
    "dpo": _Part([*_HELD_OUT, offline_data.preference_pairs, offline.dpo_checkpoint], ["dpo_job"], rounds=False),
    "distill": _Part(
        [*_HELD_OUT, offline.teacher_model, offline_data.sft_dataset, offline.distilled_checkpoint],
        ["distill_job"],
        rounds=False,
    ),
}


def all_definitions(config: RftConfig | None = None) -> dg.Definitions:
    """The definitions of projects of every kind; ``config``: the project whose runs use them."""
    parts = [_ROUNDS, _ONLINE, *_OFFLINE.values()]
    assets = {asset.key: asset for part in parts for asset in part.assets}
    return _definitions(_Part(list(assets.values()), [job for part in parts for job in part.jobs]), config)


def definitions_of(config: RftConfig) -> dg.Definitions:
    """The definitions that a project with ``config`` uses. The project's plugins are not imported."""
    offline = offline_without_plugins(config)
    part = _OFFLINE[offline] if offline is not None else _ONLINE if config.online else _ROUNDS
    return _definitions(part, config, config.evaluation.schedule)


def _definitions(part: _Part, config: RftConfig | None, schedule: str | None = None) -> dg.Definitions:
    used = [*part.assets, evaluation.evaluation_report]
    keys = {asset.key for asset in used}
    version = code_version() if config is None else code_of(config)
    launched = {*part.jobs, "evaluate_job"}
    return dg.Definitions(
        assets=[_adapted(asset, keys, version, config) for asset in used],
        jobs=[*(job for job in ALL_JOBS if job.name in launched), *MAINTENANCE_JOBS],
        sensors=[
            next_round_sensor(launched),
            *([experience_threshold_sensor] if part.rounds else []),
            alert_on_run_failure,
        ],
        schedules=[evaluation_schedule(schedule)],
        resources=_RESOURCES,
        # The engine and trainer processes do the heavy work. A process for each step would only add seconds to a round.
        executor=dg.in_process_executor,
    )


def _adapted(asset: _Asset, used: set[dg.AssetKey], version: str, config: RftConfig | None) -> _Asset:
    """``asset`` as the project has it: its dependencies, its code, the engine in use, and when its rows are overdue.

    ``used`` are the assets of the project: dependencies on others are left out.
    """
    if isinstance(asset, dg.AssetSpec):
        return asset

    def adapted(spec: dg.AssetSpec) -> dg.AssetSpec:
        deps = [dep for dep in spec.deps if dep.asset_key in used]
        changed = spec.replace_attributes(deps=deps, code_version=version)
        if config is None:
            return changed
        engine = engine_kind(config, gpu_count())
        changed = changed.replace_attributes(kinds={engine if kind == "vllm" else kind for kind in spec.kinds})
        hours = config.service.freshness_hours
        if spec.key != online.online_experiences.key or hours is None:
            return changed
        return changed.replace_attributes(
            freshness_policy=dg.FreshnessPolicy.time_window(
                fail_window=timedelta(hours=hours), warn_window=timedelta(hours=hours / 2)
            )
        )

    return asset.map_asset_specs(adapted)


def _of_home() -> dg.Definitions:
    """The definitions of the project in RFT_HOME; all where there is none, or where its file cannot be read."""
    home = Home(Path(os.environ.get("RFT_HOME", ".rft")).absolute())
    if not home.config_file.exists():
        return all_definitions()
    try:
        return definitions_of(load_config_of(home))
    except (RftError, OSError) as error:
        LOG.warning("all assets and jobs are shown, because the project's file cannot be used: %s", error)
        return all_definitions()


defs = _of_home()

if multiprocessing.parent_process() is not None:  # a process of a Dagster run, which has loaded no user code yet
    keep_imports()
    drop_safe_path()
