"""``rft models``: manage the registered versions of the model; ``releases`` adds commands for versions that serve."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rft_platform.rounds.maintenance.rebuild_registry import Rebuilt

models = typer.Typer(no_args_is_help=True, help="Manage versions of the policy: in MLflow, and in production traffic.")


@models.command()
def rebuild(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Register all checkpoints again after MLflow's database was lost, with their version numbers and aliases."""
    from rft_platform.config.home import Home
    from rft_platform.jobs.driver_lock import refuse_second_driver
    from rft_platform.rounds.maintenance.rebuild_registry import rebuild_registry
    from rft_platform.rounds.project.project import Project
    from rft_platform.rounds.setup.connections import connect_registry
    from rft_platform.run.console import output, print_json

    project = Project.open(Home.from_environment())
    refuse_second_driver(project.home)
    rebuilt = rebuild_registry(project, connect_registry(project, check=False))
    if as_json:
        print_json([report.to_json() for report in rebuilt])
        return
    console = output()
    for report in rebuilt:
        console.print(_line(report), markup=False, soft_wrap=True)


@models.command()
def rollback(
    version: Annotated[
        int | None, typer.Argument(help="Online projects: policy version to serve; by default the one before.")
    ] = None,
) -> None:
    """Make the previous champion the champion again. A repeated call goes further back.

    In an online project, serve an earlier version; a running canary or A/B test ends.
    """
    from rft_platform.common.errors import UserError
    from rft_platform.config.home import Home
    from rft_platform.jobs.driver_lock import refuse_second_driver
    from rft_platform.rounds.project.project import Project
    from rft_platform.rounds.releases.promotion import roll_back
    from rft_platform.rounds.releases.servable_versions import release_commands
    from rft_platform.rounds.setup.connections import connect_registry
    from rft_platform.run.console import output

    project = Project.open(Home.from_environment())
    if project.config.online:
        served = release_commands(project).roll_back(version)
        return output().print(f"version {served} serves again")
    if version is not None:
        raise UserError("rft models rollback VERSION is for online projects (`rft serve`): leave the version out")
    refuse_second_driver(project.home)
    registry = connect_registry(project)
    replaced = registry.last_promoted()
    champion = roll_back(project, registry)
    line = f"{champion.name}: champion is version {champion.version} again, instead of version {replaced.version}"
    return output().print(line, markup=False, soft_wrap=True)


def _line(report: "Rebuilt") -> str:
    aliases = {"champion": report.champion, "candidate": report.candidate}
    named = ", ".join(f"{alias}: version {version}" for alias, version in aliases.items() if version is not None)
    plural = "" if len(report.registered) == 1 else "s"
    done = f"{len(report.registered)} version{plural} registered again" if report.registered else "nothing was missing"
    changed = ", ".join(f"{old} is now {new}" for old, new in report.renumbered.items())
    return "; ".join(filter(None, [f"{report.model}: {done}", changed and f"renumbered: {changed}", named]))
