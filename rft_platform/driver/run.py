"""Drive a project to the end of its plan from the command line, with progress, interruption and clean-up."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.cluster.local.leases import naming_starter, used_leases
from rft_platform.cluster.local.local_cluster import end_use
from rft_platform.cluster.local.log_files import logs_bounded
from rft_platform.cluster.this_process import importing, keep_imports, terminable, undisturbed
from rft_platform.common.errors import RftError
from rft_platform.common.user_code import find_working_folder
from rft_platform.config.home import Home
from rft_platform.driver.live import showing_progress
from rft_platform.driver.round_lines import RoundNews
from rft_platform.driver.run_cost import recorded_cost
from rft_platform.jobs.driver_lock import refuse_second_driver
from rft_platform.observability.logs import configured
from rft_platform.observability.masked_output import masked

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.jobs.driver import DriveResult
    from rft_platform.rounds.project.project import Project


def drive_project(project: "Project", console: "Console", detach: bool = False) -> "DriveResult":
    """Run the plan until it is finished; raises the error that made the plan fail.

    At the end the engine and the trainer are stopped, see ``used_processes_end``. The definitions read the home from
    the environment, so call ``use_home`` first.
    """
    refuse_second_driver(project.home, project.config.mode)
    ending = used_processes_end(project.home, console, detach)
    with terminable(), ending, recorded_cost(project.home) as cost:
        with console.status("loading"), importing():
            from dagster import DagsterExecutionInterruptedError

            from rft_platform.jobs.driver import drive
            from rft_platform.project_definitions import stored_definitions
        keep_imports()  # no user code is loaded yet; excludes the imported objects from later collections
        try:
            log = project.home.logs / "driver.log"
            with (
                showing_progress(console, RoundNews(project)) as screen,
                prints_go_to(log),
                configured("driver"),
                logs_bounded(log.parent),
            ):
                result = drive(project, stored_definitions(project.home))
                if result.failed:  # the failure is raised below
                    screen.take_back_failure()
        except DagsterExecutionInterruptedError:
            raise KeyboardInterrupt from None
        cost.launches = [
            {"kind": done.kind, "round": done.round, "run_id": done.run_id, "wall_s": done.wall_s}
            for done in result.launched
        ]
    if result.failed:
        raise _failure(result)
    return result


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
    before, folder = used_leases(), home.leases.absolute()

    def used() -> list[Path]:
        return sorted(lease for lease in used_leases() - before if lease.parent == folder)

    with nullcontext() if detach else naming_starter() as starter:
        try:
            yield
        finally:
            if used():
                with undisturbed(), console.status("stopping engine and trainer"):
                    while leases := used():  # repeated: a pool restarts lost replicas in the background
                        for lease in leases:
                            end_use(lease, starter)


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
