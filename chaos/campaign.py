"""A whole chaos campaign: the projects of both modes, their undisturbed references, and all checks."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from chaos.daemon_mode import DaemonMode
from chaos.driver_mode import DriverMode, environment
from chaos.invariants.checks import check_project
from chaos.invariants.context import Context
from chaos.io_faults import plan_io_faults
from chaos.progress_probe import CANCELLED
from chaos.project_run import run_project
from chaos.records import Outcome
from chaos.schedule import Kill, Mode, schedule, shares, targets_of
from chaos.scratch import EVALUATE_EVERY, Scratch
from chaos.supervisor import ProjectRunner
from rft_platform.cluster.this_process import undisturbed
from rft_platform.common.errors import RftError
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import RoundEvaluation, read

if TYPE_CHECKING:
    from chaos.ray_platform import RayPlatform

Log: TypeAlias = Callable[[str], None]

KILLS_A_PROJECT = 40  # more kills are distributed over several new projects


def run_chaos(
    scratch: Scratch,
    kills: int,
    seed: int,
    targets: Sequence[str],
    log: Log = lambda line: None,
    side_by_side: bool = False,
    io_faults: int = 0,
    platform: "RayPlatform | None" = None,
) -> list[Outcome]:
    """Perform the kills of the seed, project by project, and check each project against an undisturbed run.

    ``side_by_side`` runs the two modes at the same time: faster, but with longer recovery times. ``io_faults`` is the
    number of file system faults, distributed over the projects. With ``platform`` all projects run on Ray.
    """
    modes = list(_plan(kills, seed, targets, platform is not None).items())
    faults = -(-io_faults // max(1, sum(len(projects) for _, projects in modes)))
    CANCELLED.clear()
    with ThreadPoolExecutor(len(modes) if side_by_side else 1) as pool:
        running = [
            pool.submit(_run_mode, scratch, mode, planned, seed, targets, log, faults, platform)
            for mode, planned in modes
        ]
        try:
            outcomes = {name: outcome for future in running for name, outcome in future.result().items()}
        except BaseException:
            CANCELLED.set()
            log("stopping: ending the scratch projects")
            with undisturbed():
                pool.shutdown()
            raise
    check_outcomes(scratch, outcomes, log)
    return list(outcomes.values())


def check_outcomes(scratch: Scratch, outcomes: Mapping[str, Outcome], log: Log = lambda line: None) -> None:
    """Check each project against an undisturbed run with the same budgets."""
    references: dict[tuple[int, ...], Project] = {}
    for name, outcome in outcomes.items():
        project = Project.open(scratch.home(name))
        budgets = _budgets_that_count(project, outcome)
        if budgets not in references:
            log(f"the undisturbed run of {name}: {' + '.join(map(str, budgets))} rounds")
            references[budgets] = _reference(scratch, budgets, len(references))
        check_project(Context(project, outcome.rounds, references[budgets]), outcome)


def _plan(kills: int, seed: int, targets: Sequence[str], on_ray: bool) -> dict[Mode, list[list[Kill]]]:
    """The kills of each project of each mode; modes without kills are omitted."""
    plan: dict[Mode, list[list[Kill]]] = {}
    counts: dict[Mode, int] = {"ray": kills} if on_ray else shares(kills, targets)
    for mode, share in counts.items():
        for first in range(1, share + 1, KILLS_A_PROJECT):
            count = min(KILLS_A_PROJECT, share + 1 - first)
            plan.setdefault(mode, []).append(schedule(seed, count, targets_of(mode, targets), first, mode))
    return plan


def _run_mode(
    scratch: Scratch,
    mode: Mode,
    projects: Sequence[Sequence[Kill]],
    seed: int,
    targets: Sequence[str],
    log: Log,
    faults: int,
    platform: "RayPlatform | None",
) -> dict[str, Outcome]:
    outcomes = {}
    for number, planned in enumerate(projects, start=1):
        name = f"{mode}-{number}"
        log(f"{name}: {len(planned)} kills")
        runner = _runner(scratch, mode, name, seed, faults, platform)
        outcomes[name] = run_project(
            runner, scratch, planned, seed, targets_of(mode, targets), partial(_log_with_name, log, name)
        )
    return outcomes


def _log_with_name(log: Log, name: str, line: str) -> None:
    log(f"{name} {line}")


def _runner(
    scratch: Scratch, mode: Mode, name: str, seed: int, faults: int, platform: "RayPlatform | None"
) -> ProjectRunner:
    if platform is not None:
        from chaos.ray_mode import RayMode

        return RayMode(scratch, name, platform)
    folder, home = scratch.root / "io-faults", scratch.home(name).root
    planned = plan_io_faults(seed, faults, folder, home, mode) if faults else None
    return DriverMode(scratch, name, planned) if mode == "driver" else DaemonMode(scratch, name, planned)


def _budgets_that_count(project: Project, outcome: Outcome) -> tuple[int, ...]:
    """The budgets that changed the project: those whose last round was evaluated for that reason, and the final one."""
    evaluated = {
        number
        for number in set(outcome.budgets)
        if number % EVALUATE_EVERY and (read(project.store, number).evaluated or RoundEvaluation()).results
    }
    return tuple(sorted(number for number in evaluated | {outcome.rounds} if number <= outcome.rounds))


def _reference(scratch: Scratch, budgets: Sequence[int], number: int) -> Project:
    """Run the same configuration with the same budgets, one after the other, without a kill."""
    home = scratch.home("reference" if number == 0 else f"reference-{number + 1}")
    command = [sys.executable, "-m", "rft_platform", "run", "--config", str(scratch.config), "--rounds"]
    for rounds in budgets:
        done = subprocess.run(
            [*command, str(rounds)], env=environment(home.root), cwd=scratch.root, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RftError(f"the undisturbed run failed with exit code {done.returncode}:\n{done.stderr}")
    return Project.open(home)
