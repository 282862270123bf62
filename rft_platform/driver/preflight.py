"""All checks before a run starts: settings, files, data, judge, workflow, models, disk space."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object
from rft_platform.config.allowed_changes import check_unchanged, relocated
from rft_platform.config.checks.check_config import check_config
from rft_platform.config.dry_run import RunPlan, run_plan
from rft_platform.config.gpu_placement import gpu_count
from rft_platform.config.home import Home
from rft_platform.config.load import load_config_of
from rft_platform.config.memory_plan import gpu_bytes
from rft_platform.config.online_halves import before_joining
from rft_platform.config.resolve import policies_of
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.driver.console import notes
from rft_platform.driver.machine import cpu_count
from rft_platform.driver.model_check import model_check
from rft_platform.driver.offline_checks import offline_notices, offline_problems
from rft_platform.driver.prompt_lengths import check_prompt_lengths, task_lines
from rft_platform.driver.service_checks import service_problems

if TYPE_CHECKING:
    from rft_platform.rounds.project.project import Project

_LEAST_FREE = 256 * 2**20  # bytes for databases, logs and rows of a small run
_COPIES = 6  # copies of the weights: a checkpoint has weights and two moments, and two checkpoints exist at a time


def check_run(home: Home, config: RftConfig, dry: bool = False, service: bool = False) -> RunPlan:
    """The plan of a run that may start. Raises UserError with a line for each problem; writes nothing.

    With ``dry``, a run that would be refused because of its mode gets a plan too, with a notice of the refusal.
    ``service``: ``rft serve`` starts the run.
    """
    from rft_platform.rounds.maintenance.verification import check_judgements
    from rft_platform.rounds.project.project import Project
    from rft_platform.rounds.setup.connections import check_registry

    refusal = _wrong_command(config, service)
    if refusal is not None and not dry:
        raise UserError(refusal)
    project = Project(home, config)
    gpus, gpu_memory = gpu_count(), gpu_bytes()
    check_config(project.settings, cpu_count=cpu_count(), gpu_count=gpus, gpu_bytes=gpu_memory)
    with notes().status("checking settings, data and code") as status, model_check(config) as models:
        warm_start: list[str] = []
        problems = [*_problems(project), *_attempt(lambda: warm_start.extend(_warm_start_lines(project)))]
        problems += [] if dry else _missing_models(config)
        if not problems:  # wait for the check of the models, which takes seconds, only if all other checks pass
            status.update("checking that the trainer accepts the model")
            problems = list(models.problems())
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    if not dry:
        check_registry(project)
        check_judgements(project.store)
    task_count = len(project.tasks.tasks) if config.buffer.explorer_input.explored else None
    plan = run_plan(project.settings, gpu_count=gpus, task_count=task_count, gpu_bytes=gpu_memory)
    refusals = () if refusal is None else (refusal,)
    unfetched = _unfetched_models(config) if dry else ()
    notices = (*refusals, *unfetched, *plan.notices, *_data_notices(project))
    tasksets = (*plan.tasksets, *task_lines(project), *warm_start)
    return replace(plan, home=str(home.root), tasksets=tasksets, notices=notices)


def _wrong_command(config: RftConfig, service: bool) -> str | None:
    """Why this command cannot run the configuration; None if it can."""
    if config.online and not service:
        return (
            f"mode {config.mode} without a taskset and with storage_type sql trains on production traffic: start it "
            "with `rft serve --config FILE`"
        )
    if service and not config.online:
        return (
            "this project explores tasks: an online project has no buffer.explorer_input.taskset and "
            "buffer.trainer_input.experience_buffer.storage_type: sql; `rft run` starts this one"
        )
    return None


def check_writable(home: Home) -> None:
    """Raise UserError if the project's folder cannot be created or written."""
    folder = nearest_folder(home.root)
    if not folder.is_dir():
        raise UserError(f"RFT_HOME {home.root}: {folder} is a file; point RFT_HOME at a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"RFT_HOME {home.root}: {folder} cannot be written; point RFT_HOME at a folder that you own")


def refuse_bad_target(json_file: Path | None) -> None:
    """Raise UserError if ``json_file`` cannot be written. Called before a run, which takes minutes."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"--json {json_file}: its folder does not exist; create it first")
    if json_file is not None and json_file.is_dir():
        raise UserError(f"--json {json_file}: this is a folder; give a file")


def check_room(home: Home, model: Path | None = None) -> None:
    """Raise UserError if the disk has no space for a few checkpoints of ``model``; None means a small model."""
    free = shutil.disk_usage(nearest_folder(home.root)).free
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model is not None else 0
    needed = max(_LEAST_FREE, _COPIES * weights)
    if free < needed:
        raise UserError(
            f"RFT_HOME {home.root}: no space, {free / 2**20:,.0f} MiB free and {needed / 2**20:,.0f} MiB needed for "
            "rows and checkpoints; free disk space, or point RFT_HOME at another disk"
        )


def nearest_folder(path: Path) -> Path:
    """``path``, or its nearest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _problems(project: "Project") -> Iterator[str]:
    """One line per problem that would make the run fail."""
    from rft_platform.inference.launch.launcher import check_model_folder
    from rft_platform.rounds.exchange.records import exchange_key
    from rft_platform.rounds.selection.production_rows import check_database
    from rft_platform.rounds.selection.row_selection import priority_of
    from rft_platform.rounds.selection.task_selection import check_selector
    from rft_platform.rounds.setup.algorithm import check_algorithm, check_operators
    from rft_platform.rounds.setup.connections import check_engines, check_registered
    from rft_platform.rounds.setup.side_engines import check_keys
    from rft_platform.rounds.setup.taskset_binding import check_judge, check_workflow

    config, home = project.config, project.home
    yield from _attempt(check_algorithm, project.settings)
    yield from _attempt(check_operators, project.settings)
    model, inputs = Path(config.model.model_path), config.buffer.explorer_input
    yield from _attempt(check_may_start, home, config)
    yield from _attempt(check_keys, config)
    yield from _attempt(check_writable, home)
    if no_room := list(_attempt(check_room, home, model if _writes_checkpoints(config) else None)):
        yield from () if is_finished(project) else no_room
    yield from _attempt(priority_of, config.buffer.trainer_input.experience_buffer.replay_buffer)
    yield from _service_functions(config)
    if config.online:
        yield from _attempt(check_database, project)
        yield from _attempt(exchange_key, config)
    if not (is_finished(project) or (config.online and home.holds_results)):  # a restart does not wait for services
        yield from service_problems(config)
    if _serves(project):
        yield from _attempt(check_engines, project)
    if model.is_dir():
        yield from _attempt(check_model_folder, model)
    for key, name in _models(config).items():
        if name.startswith("models:/"):
            yield from _attempt(check_registered, project, name, key)
    if inputs.explored:
        yield from _attempt(check_selector, project)  # also reads the tasks
    yield from _attempt(lambda: project.eval_tasks)
    if project.settings.offline is not None:
        yield from offline_problems(project)
    for taskset in inputs.every.values():
        yield from _attempt(check_workflow, project, taskset)
        yield from _attempt(check_judge, project, taskset)
        yield from _attempt(check_prompt_lengths, project, taskset)


def _warm_start_lines(project: "Project") -> list[str]:
    """The line of the plan about a warm start that has not ended. Raises UserError for unusable demonstrations."""
    from rft_platform.rounds.project.record import published
    from rft_platform.rounds.setup.demonstrations import most_steps, read_demonstrations

    settings, experts = project.config.warm_start, project.config.algorithm.experts
    if experts is not None and experts.path is not None and project.settings.spec.expert_weight is not None:
        read_demonstrations(experts, "algorithm.experts")
    if settings is None or published(project.store, 0) is not None:
        return []
    columns, _ = read_demonstrations(settings)
    rows = len(next(iter(columns.values())))
    goal = "" if settings.stop_at is None else f", until sampled_pass reaches {settings.stop_at:g}"
    return [
        f"warm start {settings.path}: {rows:,} rows, {settings.batch_size:,} a step, at most "
        f"{most_steps(settings, rows):,} optimiser steps{goal}"
    ]


def _service_functions(config: RftConfig) -> Iterator[str]:
    """One line for each function of the online service that cannot be imported."""
    for reference in config.service.selection:
        yield from _attempt(load_object, reference, "service.selection")
    if config.service.redaction is not None:
        yield from _attempt(load_object, config.service.redaction, "service.redaction")


def is_finished(project: "Project") -> bool:
    """Whether nothing is left to do in the project's folder."""
    from rft_platform.rounds.planning.plan import plan_next
    from rft_platform.rounds.planning.project_state import Launches, observe

    return project.home.holds_results and plan_next(observe(project, Launches())).finished


def _writes_checkpoints(config: RftConfig) -> bool:
    return config.mode in ("both", "train", "colocate") and not config.model.lora_configs


def _serves(project: "Project") -> bool:
    """Whether the run needs an engine; an offline training needs one for its evaluation."""
    return project.settings.offline is None or bool(project.config.buffer.explorer_input.eval_tasksets)


def _missing_models(config: RftConfig) -> list[str]:
    """One line per model that the engine would not find at its start; names of hub models are looked up on the hub."""
    from rft_platform.rounds.setup.connections import check_model

    return [line for key, name in _models(config).items() for line in _attempt(check_model, name, key)]


def _unfetched_models(config: RftConfig) -> list[str]:
    """One notice per hub model that a run would download first; uses no network."""
    from rft_platform.rounds.setup.connections import is_hub_name, was_fetched

    return [
        f"{key} {name}: neither a folder here nor in the Hugging Face cache; a run downloads it first"
        for key, name in _models(config).items()
        if is_hub_name(name) and not was_fetched(name)
    ]


def _models(config: RftConfig) -> dict[str, str]:
    """The models for which an engine starts, by configuration key."""
    models = {policy.key: policy.model_path for policy in policies_of(config).values()}
    own = [entry for entry in config.explorer.auxiliary_models if not entry.base_url]
    return models | {f"explorer.auxiliary_models ({entry.known_as}).model_path": entry.model_path for entry in own}


def _data_notices(project: "Project") -> Iterator[str]:
    """Lines about rows left out of datasets, and about held-out tasks that are also explored."""
    from rft_platform.tasks.dataset import find_leaks

    if project.settings.offline is not None:
        yield from offline_notices(project)
    explored = list(project.datasets.values()) if project.config.buffer.explorer_input.explored else []
    held_out = [dataset for _, dataset in project.eval_tasks]
    for dataset in [*explored, *held_out]:
        report = dataset.report
        if report.duplicates or report.empty:
            left_out = f"{report.duplicates} duplicate and {report.empty} empty of {report.rows} rows"
            yield f"{report.source}: left out {left_out}"
    for dataset in held_out if explored else []:
        leaks = find_leaks(project.tasks.tasks, dataset.tasks)
        if leaks:
            yield f"{dataset.report.source}: {len(leaks)} of {len(dataset.tasks)} held-out tasks are also explored"


def _attempt(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Yield the message of a UserError raised by ``check``."""
    try:
        check(*arguments)
    except UserError as error:
        yield str(error)


def check_may_start(home: Home, config: RftConfig) -> None:
    """Raise UserError if the folder has results of another project, or of this project with other settings."""
    from rft_platform.rounds.exchange.following import followed_home

    if not home.config_file.exists() or not home.holds_results:
        return
    if config.mode != "serve" and (place := followed_home(home)) is not None:
        raise UserError(
            f"{home.root} only serves, and its versions come from the home that publishes at {place}: train there, or "
            "point RFT_HOME at another folder"
        )
    old = relocated(load_config_of(home), config)
    if (old.project, old.name) != (config.project, config.name):
        raise UserError(
            f"{home.root} holds the project {old.project}/{old.name}, not {config.project}/{config.name}: point "
            "RFT_HOME at another folder, or move this project away"
        )
    check_unchanged(before_joining(old, config), config)
    if not config.continue_from_checkpoint and home.rounds.is_dir():
        raise UserError(
            f"continue_from_checkpoint is false, and {home.root} holds rounds of {old.project}/{old.name}: set it "
            "to true to continue, or point RFT_HOME at another folder"
        )
