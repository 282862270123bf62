"""Describe what a project launches next, or what it waits for, on the terminal and on the status page."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rft_platform.rounds.planning.plan import Plan
    from rft_platform.rounds.planning.project_state import Launches
    from rft_platform.rounds.project.project import Project


def what_is_next(project: "Project") -> list[str]:
    """The launches as sentences: what is running, what starts next, what the project waits for, or what failed."""
    if project.config.mode == "serve":
        return ["this home only serves; the training runs in mode train"]
    from rft_platform.jobs.driver_lock import driver_is_running
    from rft_platform.rounds.planning.plan import plan_next
    from rft_platform.rounds.planning.project_state import observe

    recorded, is_driven = _known_launches(project), driver_is_running(project.home)
    cut = [] if is_driven else sorted(recorded.interrupted)
    start = "starting policy" if project.config.warm_start is None else "warm start"
    plan = plan_next(observe(project, replace(recorded, running=recorded.running - set(cut))))
    described = describe_plan(plan, project.rounds_budget, start)
    if cut:
        names = ", ".join(_launch_name(*launch, start) for launch in cut)
        return [f"interrupted: {names} (its process has ended)", "`rft run` continues it", *described]
    return ["`rft run` or `rft demo` is driving this project", *described] if is_driven else described


def _known_launches(project: "Project") -> "Launches":
    """Dagster's record of the project's launches; empty if none was launched yet."""
    from rft_platform.rounds.planning.project_state import Launches

    if not (project.home.dagster / "dagster.yaml").exists():
        return Launches()
    from rft_platform.jobs.instance import open_instance
    from rft_platform.jobs.launches import launches

    with open_instance(project.home, capture_output=False) as instance:
        return launches(instance)


def describe_plan(plan: "Plan", rounds_budget: int, start: str = "warm start") -> list[str]:
    """Describe a plan in sentences; ``start`` is the name of the launch that makes round 0."""
    if plan.finished:
        done = f"all {rounds_budget} rounds are done" if rounds_budget > 1 else "its round is done"
        return [f"finished: {done}"]
    if plan.failed:
        return [f"failed: {plan.failed}"]
    return [*(f"next: {_launch_name(action.kind, action.round, start)}" for action in plan.actions), *plan.waiting]


def _launch_name(kind: str, number: int, start: str) -> str:
    from rft_platform.experience.file_names import round_key

    return start if kind == "warm_start" else f"{kind} {round_key(number)}"
