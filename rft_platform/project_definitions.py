"""The assets, jobs, sensors, schedules and resources of a project, as Dagster's ``Definitions``.

``definitions_of`` has those that a project uses: an asset that nothing makes would stay "missing" for ever. The code
location and the commands that run jobs themselves use the same definitions: Dagster marks an asset as unsynced if its
dependencies or its code version differ from those with which it was made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import dagster as dg

from rft_platform.assets import evaluation, experiences, imports, offline, online, policy, prompts, tasks
from rft_platform.assets.common import ProjectAsset
from rft_platform.config.gpu_placement import engine_kind, gpu_count
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.config.resolve import offline_without_plugins
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.jobs.alerts import alert_sensor
from rft_platform.jobs.jobs import asset_jobs
from rft_platform.jobs.maintenance import maintenance_jobs
from rft_platform.jobs.sensors import evaluation_schedule, experience_threshold_sensor, next_round_sensor
from rft_platform.resources.names import PLAIN_NAMES, DagsterNames
from rft_platform.resources.project import (
    EngineResource,
    ProjectResource,
    RegistryResource,
    RoundTables,
    TrainerResource,
)
from rft_platform.rounds.project.code_version import code_of, release
from rft_platform.traces.imports import import_kind

_Asset = ProjectAsset | dg.AssetSpec


@dataclass(frozen=True, slots=True)
class _Part:
    """The assets and jobs of one kind of project, beside its evaluation."""

    assets: Sequence[_Asset]
    jobs: Sequence[str]
    rounds: bool = True  # whether a sensor starts the second half of rounds


_START: list[_Asset] = [tasks.task_dataset, tasks.eval_task_dataset, policy.base_model]
_TRAINED: list[_Asset] = [experiences.judged_experiences, policy.policy_checkpoint]
_ROUNDS = _Part(
    [*_START, policy.warm_start_checkpoint, policy.policy_snapshot, experiences.rollout_batches, *_TRAINED],
    ["warm_start_job", "explore_job", "sync_round_job", "judge_job"],
)
_ONLINE = _Part(
    [
        *(*_START, policy.warm_start_checkpoint, online.online_experiences, online.online_demonstrations),
        *(*_TRAINED, online.release_report),
    ],
    ["warm_start_job", "collect_job", "sync_round_job", "judge_job", "release_job"],
)
_HELD_OUT: list[_Asset] = [tasks.eval_task_dataset, policy.base_model]
_OFFLINE = {
    "sft": _Part([*_HELD_OUT, offline.sft_dataset, offline.sft_checkpoint], ["sft_job"], rounds=False),
    "dpo": _Part([*_HELD_OUT, offline.preference_pairs, offline.dpo_checkpoint], ["dpo_job"], rounds=False),
    "distill": _Part(
        [*_HELD_OUT, offline.teacher_model, offline.sft_dataset, offline.distilled_checkpoint],
        ["distill_job"],
        rounds=False,
    ),
}
_IMPORTS = _Part([imports.imported_traces], [], rounds=False)
_PROMPTS = _Part([prompts.optimised_prompt], ["prompt_job"], rounds=False)


def all_definitions() -> dg.Definitions:
    """The definitions of projects of every kind, for a code location without a project."""
    parts = [_IMPORTS, _PROMPTS, _ROUNDS, _ONLINE, *_OFFLINE.values()]
    assets = {_plain_name(asset): asset for part in parts for asset in part.assets}
    every = _Part(list(assets.values()), [job for part in parts for job in part.jobs])
    return _definitions(every, None, PLAIN_NAMES, None)


def stored_definitions(home: Home) -> dg.Definitions:
    """The definitions of the project in ``home``. They follow from its stored file, not from options of a command.

    Raises UserError if the file cannot be used.
    """
    return definitions_of(load_config_of(home))


def definitions_of(
    config: RftConfig, names: DagsterNames = PLAIN_NAMES, project: ProjectResource | None = None
) -> dg.Definitions:
    """The definitions that a project with ``config`` uses. The project's plugins are not imported.

    ``project`` is the resource of its folder in a deployment of several projects; None: that of RFT_HOME, which has its
    own instance of Dagster.
    """
    offline = offline_without_plugins(config)
    part = _OFFLINE[offline] if offline is not None else _ONLINE if config.online else _ROUNDS
    if _readers_of_imports(config):
        part = replace(part, assets=[imports.imported_traces, *part.assets])
    if config.prompt_search is not None and offline is None:
        part = replace(part, assets=[*part.assets, *_PROMPTS.assets], jobs=[*part.jobs, *_PROMPTS.jobs])
    return _definitions(part, config, names, project, config.evaluation.schedule)


def _definitions(
    part: _Part, config: RftConfig | None, names: DagsterNames, own: ProjectResource | None, schedule: str | None = None
) -> dg.Definitions:
    project = own or ProjectResource()
    used = [*part.assets, evaluation.evaluation_report]
    keys = {names.key(_plain_name(asset)) for asset in used}
    version = release() if config is None else code_of(config)
    jobs = asset_jobs(names, {*part.jobs, "evaluate_job"})
    every_job = [*jobs.values(), *maintenance_jobs(names)]
    resources = {
        "project": project,
        "engine": EngineResource(project=project),
        "trainer": TrainerResource(project=project),
        "registry": RegistryResource(),
        "tables": RoundTables(project=project),
    }
    return dg.Definitions(
        assets=[_adapted(asset, names, keys, version, config) for asset in used],
        jobs=every_job,
        sensors=[
            next_round_sensor(names, jobs),
            *([experience_threshold_sensor(names, jobs["sync_round_job"])] if part.rounds else []),
            alert_sensor(names, {job.name for job in every_job}, keys, own_instance=own is None),
        ],
        schedules=[evaluation_schedule(names, jobs["evaluate_job"], schedule)],
        resources={names.name(name): resource for name, resource in resources.items()},
    )


def _readers_of_imports(config: RftConfig) -> set[str]:
    """The plain names of the assets whose configured data are datasets of imported traces."""
    buffer = config.buffer
    paths: dict[str, list[str | None]] = {
        "task_dataset": [taskset.path for taskset in buffer.explorer_input.explored.values()],
        "eval_task_dataset": [taskset.path for taskset in buffer.explorer_input.eval_tasksets],
        "sft_dataset": [buffer.trainer_input.experience_buffer.path],
        "preference_pairs": [buffer.trainer_input.experience_buffer.path],
        "warm_start_checkpoint": [config.warm_start.path] if config.warm_start is not None else [],
        "policy_checkpoint": [config.algorithm.experts.path] if config.algorithm.experts is not None else [],
    }
    return {name for name, given in paths.items() if any(import_kind(path) is not None for path in given)}


def _plain_name(asset: _Asset) -> str:
    return asset.name if isinstance(asset, ProjectAsset) else asset.key.path[-1]


def _adapted(
    asset: _Asset, names: DagsterNames, used: set[dg.AssetKey], version: str, config: RftConfig | None
) -> dg.AssetsDefinition | dg.AssetSpec:
    """``asset`` as the project has it: its dependencies, its code, the engine in use, and when its rows are overdue.

    ``used`` are the assets of the project: dependencies on others are left out.
    """
    if isinstance(asset, dg.AssetSpec):
        return asset.replace_attributes(key=names.key(_plain_name(asset)), group_name=names.name(str(asset.group_name)))

    def adapted(spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the spec with the dependencies, kinds and freshness policy of this configuration."""
        deps = [dep for dep in spec.deps if dep.asset_key in used]
        if config is not None and spec.key.path[-1] not in _readers_of_imports(config):
            deps = [dep for dep in deps if dep.asset_key != names.key(imports.imported_traces.name)]
        changed = spec.replace_attributes(deps=deps, code_version=version)
        if config is None:
            return changed
        engine = engine_kind(config, gpu_count())
        changed = changed.replace_attributes(kinds={engine if kind == "vllm" else kind for kind in spec.kinds})
        hours = config.service.freshness_hours
        if asset is not online.online_experiences or hours is None:
            return changed
        return changed.replace_attributes(
            freshness_policy=dg.FreshnessPolicy.time_window(
                fail_window=timedelta(hours=hours), warn_window=timedelta(hours=hours / 2)
            )
        )

    return asset.of(names).map_asset_specs(adapted)
