"""``rft rounds``: the progress of the project, one line per round."""

from typing import Annotated

import typer


def rounds(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    last: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of newest rounds to show, 0 for all; default: 100, or all with --json.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show each round: reward, pass rates, KL, speed, time per stage, weights; and what comes next.

    `sampled`, `greedy`: pass rates on the held-out tasks (a run passes if its reward >= 1).

    `s: roll/judge/train/eval/other`: seconds of rollouts, judging, training and evaluation, and of all else.
    """
    from rft_platform.cli.views.round_table import LAST, print_rounds
    from rft_platform.config.home import Home
    from rft_platform.online.project import open_project
    from rft_platform.online.releases.versions import pinned_version
    from rft_platform.run.console import output, print_json
    from rft_platform.run.round_lines import round_lines
    from rft_platform.servers.next_launches import what_is_next

    project = open_project(Home.from_environment())
    if as_json:
        print_json(
            {
                "rounds": round_lines(project, last or 0),
                "next": "; ".join(what_is_next(project)),
                "pinned": pinned_version(project),
            }
        )
    else:
        print_rounds(project, output(), LAST if last is None else last)
