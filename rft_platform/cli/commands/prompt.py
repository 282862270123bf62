"""``rft prompt``: search for a better system prompt, and compare it with the training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rft_platform.rounds.project.project import Project

prompt = typer.Typer(no_args_is_help=True, help="Search for a better system prompt, and compare it with the training.")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@prompt.command()
def optimise(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Configuration; by default the one that the project was started with."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search for a better system prompt for the starting weights, by the section prompt_search.

    The best prompt is measured on the held-out tasks, has to pass the gate, and is registered in MLflow with its
    lineage; nothing is registered if no prompt was better. The starting weights are made first if there are none yet.
    """
    from rft_platform.cli.commands.evaluate import check_engine_is_free
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config
    from rft_platform.online.project import open_project
    from rft_platform.rounds.prompt_search import check_prompt_search
    from rft_platform.run.console import notes
    from rft_platform.run.start import begin, search_prompt, use_home

    home = Home.from_environment()
    use_home(home)
    if config is not None:
        begin(home, load_config(config))
    project = open_project(home)
    check_engine_is_free(project)
    check_prompt_search(project)
    search_prompt(project, notes())
    _print_report(project, as_json)


@prompt.command()
def report(as_json: Json = False) -> None:
    """Compare the newest search for a prompt with the rounds evaluated since; writes the report again."""
    from rft_platform.config.home import Home
    from rft_platform.online.project import open_project

    _print_report(open_project(Home.from_environment()), as_json)


def _print_report(project: "Project", as_json: bool) -> None:
    from dataclasses import asdict

    from rft_platform.rounds.reporting.prompt_report import headline, read_prompt_result, write_prompt_report
    from rft_platform.run.console import output, print_json

    result = read_prompt_result(project.home)
    written = write_prompt_report(project, result)
    if as_json:
        print_json({**asdict(result), "report": str(written)})
        return
    unregistered = "not registered" if result.found else "the starting one; nothing was registered"
    better = "better" if result.decision.passed else "not better"
    lines = {
        "": headline(project, result),
        "gate": f"{better}: {result.decision.reason}",
        "prompt": f"{result.address or unregistered}, from {result.runs:,} runs",
        "report": str(written),
    }
    for name, line in lines.items():
        output().print(f"{name:<8}{line}" if name else line, markup=False, soft_wrap=True, highlight=False)
    output().print(result.best.text, markup=False, soft_wrap=True, highlight=False)
