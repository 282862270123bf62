"""Start a project and drive it to the end of its plan: check and write its configuration, run, clean up at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rft_platform.cluster.local.leases import naming_starter
from rft_platform.cluster.local.log_files import logs_bounded
from rft_platform.cluster.this_process import importing, keep_imports, terminable, undisturbed
from rft_platform.common.errors import RftError, UserError
from rft_platform.common.files import write_json, write_text
from rft_platform.common.progress import announce
from rft_platform.common.user_code import find_working_folder
from rft_platform.config.allowed_changes import changed_keys, check_unchanged, relocated
from rft_platform.config.checks.machine import stored_copy_problems
from rft_platform.config.dry_run import RunPlan
from rft_platform.config.home import Home
from rft_platform.config.load import dump_config, load_config_of
from rft_platform.config.online_halves import decided_elsewhere, joined
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.experience.store import ExperienceStore
from rft_platform.jobs.driver_lock import config_lock, other_half_runs, refuse_second_driver
from rft_platform.object_store.mirror import open_mirror, store_changes
from rft_platform.observability.logs import configured
from rft_platform.observability.masked_output import masked
from rft_platform.online.project import open_project
from rft_platform.rounds.project.record import move_folders, published
from rft_platform.rounds.project.repair import repeat_unstored
from rft_platform.run.checks import check_run
from rft_platform.run.console import notes
from rft_platform.run.round_lines import RoundNews
from rft_platform.run.run_cost import recorded_cost

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.rounds.project.project import Project
    from rft_platform.run.driver import DriveResult

_LOADING = "loading Dagster and the project's assets"


def with_rounds(config: RftConfig, rounds: int | None) -> RftConfig:
    """The configuration with a budget of ``rounds`` rounds; unchanged if ``rounds`` is None."""
    if rounds is None:
        return config
    if config.mode == "train":
        raise UserError("--rounds: mode train uses existing data (explored rounds or a dataset); leave it out")
    buffer = config.buffer.model_copy(update={"total_steps": rounds * config.synchronizer.batches_a_round})
    trainer = config.trainer.model_copy(update={"total_steps": None})
    return config.model_copy(update={"buffer": buffer, "trainer": trainer})


def on_cluster(config: RftConfig, kind: Literal["local", "ray"] | None) -> RftConfig:
    """The configuration with another ``cluster.kind``; unchanged if ``kind`` is None."""
    if kind is None:
        return config
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"kind": kind})})


def write_config(home: Home, config: RftConfig) -> None:
    """Write the configuration that every process of the project reads. Raises UserError while another run is active.

    If the other half of the project (mode explore or train) is running, its configuration stays in force, and a
    configuration with other values is refused.
    """
    with config_lock(home):  # another command, or the other half of an online project, may start now too
        refuse_second_driver(home, config.mode)
        _write(home, _joined(home, config))


def stored_config(home: Home) -> RftConfig | None:
    """The project's configuration in force; None before the first start."""
    return load_config_of(home) if home.config_file.exists() else None


def _joined(home: Home, config: RftConfig) -> RftConfig:
    """The project's configuration after a command with ``config``; the folder of its file may have moved."""
    stored = stored_config(home)
    return joined(None if stored is None else relocated(stored, config), config)


def _write(home: Home, config: RftConfig) -> None:
    if other_half_runs(home, config.mode) and home.config_file.exists():
        running = relocated(load_config_of(home), config)
        check_unchanged(running, config)
        if changed := changed_keys(running, config).keys() - {"mode"}:
            raise UserError(
                f"the other half of this project runs with other values of {', '.join(sorted(changed))}: give both "
                "halves the same settings apart from `mode`, or change them while neither runs"
            )
        return
    _follow_moved_models(home, config)
    write_text(home.config_file, dump_config(config, home))
    if config.cluster.ray is None:
        home.ray_cluster.unlink(missing_ok=True)
    else:
        write_json(home.ray_cluster, config.cluster.ray)
    if config.folder is not None and config.folder != home.root:  # otherwise the file is the home's own
        write_text(home.config_source, str(config.folder))
    home.make_private()  # the folder may have existed before


def _follow_moved_models(home: Home, config: RftConfig) -> None:
    """If the folder of the user's file has moved with the models in it, records of the project name their new place."""
    stored = stored_config(home) if home.holds_results else None
    if stored is None:
        return
    moved = changed_keys(stored, relocated(stored, config))
    paths = {before: after for before, after in moved.values() if isinstance(before, str)}
    if paths:
        move_folders(ExperienceStore(home.rounds), paths)


def begin(home: Home, config: RftConfig, service: bool = False) -> RunPlan:
    """Check a configuration and write it to the project's folder; returns its plan. ``service``: for ``rft serve``.

    Raises UserError if the configuration cannot be run. Then nothing is written, except that a home with a
    ``store_url`` has the stored files; the home that drives the project is left alone.
    """
    if config.store_url is not None:
        for problem in stored_copy_problems(config):
            raise UserError(str(problem))
        open_mirror(home.root, config.store_url).bring()
    whole = _joined(home, config)
    plan = check_run(home, whole, service=service)
    for finding in (*plan.findings, *decided_elsewhere(whole, config)):
        notes().print(f"note: {finding}", markup=False, soft_wrap=True)
    if config.store_url is not None:
        open_mirror(home.root, config.store_url).claim()
    write_config(home, config)
    if config.store_url is not None:
        store_changes(home.root)
        repeat_unstored(open_project(home))
    return plan


def is_in_force(home: Home, config: RftConfig) -> bool:
    """Whether the project of ``home`` was started with exactly this configuration."""
    stored = stored_config(home)
    return stored is not None and stored == _joined(home, config)


def drive_project(project: "Project", console: "Console", detach: bool = False) -> "DriveResult":
    """Run the plan until it is finished; raises the error that made the plan fail.

    At the end the engine and the trainer are stopped, see ``used_processes_end``. The definitions read the home from
    the environment, so call ``use_home`` first.
    """
    from rft_platform.run.live import showing_progress

    refuse_second_driver(project.home, project.config.mode)
    ending = used_processes_end(project.home, console, detach)
    with (
        terminable(),
        ending,
        recorded_cost(project.home) as cost,
        showing_progress(console, RoundNews(project)) as screen,
    ):
        announce(_LOADING)
        with importing():
            from dagster import DagsterExecutionInterruptedError

            from rft_platform.project_definitions import stored_definitions
            from rft_platform.run.driver import DriveResult, drive
        keep_imports()
        log, result = project.home.logs / "driver.log", DriveResult()
        try:
            with prints_go_to(log), configured("driver"), logs_bounded(log.parent):
                drive(project, stored_definitions(project.home), result=result)
        except DagsterExecutionInterruptedError:
            raise KeyboardInterrupt from None
        finally:  # an interrupted drive has a cost too
            cost.launches = [
                {"kind": done.kind, "round": done.round, "run_id": done.run_id, "wall_s": done.wall_s}
                for done in result.launched
            ]
        if result.failed:  # the failure is raised below
            screen.take_back_failure()
    if result.failed:
        raise _failure(result)
    return result


def search_prompt(project: "Project", console: "Console") -> None:
    """Search for a prompt (`rft prompt optimise`); the starting weights are made first if there are none.

    Raises the error that ended it. The definitions read the home from the environment, so call ``use_home`` first.
    """
    from rft_platform.run.live import showing_progress

    with terminable(), used_processes_end(project.home, console), showing_progress(console):
        announce(_LOADING)
        with importing():
            from rft_platform.project_definitions import stored_definitions
            from rft_platform.run.driver import drive, run_job
        keep_imports()
        log, definitions = project.home.logs / "driver.log", stored_definitions(project.home)
        with prints_go_to(log), configured("driver"), logs_bounded(log.parent):
            if published(project.store, 0) is None:
                made = drive(project, definitions, max_launches=1)
                if made.error is not None:
                    raise made.error
            run_job(project, definitions, "prompt_job")


def use_home(home: Home) -> None:
    """Use ``home`` in every module imported and process started later, and find user code in the current folder."""
    os.environ["RFT_HOME"] = str(home.root)
    os.environ["DAGSTER_HOME"] = str(home.dagster)
    find_working_folder()


@contextmanager
def used_processes_end(home: Home, console: "Console", detach: bool = False) -> Iterator[None]:
    """Stop each engine and trainer that the block used, if a command started it and no other process uses it.

    With ``detach`` nothing is stopped, and processes that the block starts run until their idle time-out.
    """
    cluster = home.cluster
    before = cluster.used()
    with nullcontext() if detach else naming_starter() as starter:
        try:
            yield
        finally:
            if cluster.used() - before:
                with undisturbed(), console.status("stopping engine and trainer"):
                    while names := cluster.used() - before:  # repeated: a pool restarts lost replicas in the background
                        for name in sorted(names):
                            cluster.end_use(name, starter)


@contextmanager
def prints_go_to(log: Path) -> Iterator[None]:
    """Append the output of the block (mainly Dagster's log of every event) to ``log``, with secrets masked."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8", buffering=1) as stream:
        quiet = masked(stream)
        with redirect_stdout(quiet), redirect_stderr(quiet):
            yield


def _failure(result: "DriveResult") -> RftError:
    cause, said = result.error, result.failed or ""
    if cause is not None and str(cause) not in said:
        said = f"{said}\n{cause}"
    return RftError(said) if cause is None else type(cause)(said)
