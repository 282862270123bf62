"""``rft run``: check a configuration, write it to the project's folder, and drive the project to the end."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def run(
    config: Annotated[Path, typer.Option("--config", "-c", help="The project's YAML file.", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and stop.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds of the whole run; overrides the file.")
    ] = None,
    cluster: Annotated[
        Literal["local", "ray"] | None,
        typer.Option(help="Where engines, trainer and workers run; overrides cluster.kind of the file."),
    ] = None,
    detach_engines: Annotated[
        bool, typer.Option("--detach-engines", help="Keep engine and trainer running until their idle time-out.")
    ] = False,
) -> None:
    """Train as a configuration file says; continues a run that was started before."""
    from rft_platform.config.dry_run import render_plan
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config
    from rft_platform.run.checks import check_run
    from rft_platform.run.console import notes, output
    from rft_platform.run.next_steps import model_uri, print_next_steps, rft_command_with
    from rft_platform.run.round_lines import round_lines
    from rft_platform.run.start import begin, drive_project, on_cluster, use_home, with_rounds

    home, console = Home.from_environment(), notes()
    use_home(home)
    loaded = on_cluster(with_rounds(load_config(config), rounds), cluster)
    if dry_run:
        output().print(render_plan(check_run(home, loaded, dry=True)), end="", markup=False, soft_wrap=True)
        return
    plan = begin(home, loaded)

    from rft_platform.cli.views.round_table import print_rounds
    from rft_platform.online.project import open_project

    project = open_project(home).in_mode(loaded.mode)
    console.print(plan.title, style="bold", markup=False)
    try:
        drive_project(project, console, detach_engines)
    except KeyboardInterrupt:
        given = {"config": config, "rounds": rounds, "cluster": cluster, "detach_engines": detach_engines}
        again = rft_command_with(home, "run", **given)
        console.print(f"interrupted: `{again}` continues this run", markup=False, soft_wrap=True)
        raise
    if project.config.mode == "bench":
        from rft_platform.cli.views.round_table import print_bench

        print_bench(project)
        return
    print_rounds(project, output())
    last = next((line for line in reversed(round_lines(project)) if line.policy_version), None)
    if last is not None:
        print_next_steps(project, output(), model_uri(project, last), last.checkpoint)
