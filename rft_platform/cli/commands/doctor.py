"""``rft doctor``: check everything that a run needs, and print how to fix what is missing."""

from dataclasses import asdict
from typing import Annotated

import typer

_MARKS = {"ok": "[green]ok[/]  ", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check versions, devices, processes, ports and the project's folder; print a fix for each problem."""
    from rich.markup import escape

    from rft_platform.cli.views.doctor_checks import findings
    from rft_platform.config.home import Home
    from rft_platform.run.console import output, print_json

    found = list(findings(Home.from_environment()))
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        console = output()
        for finding in found:
            fix = f"\n{'':<20}-> {escape(finding.fix)}" if finding.fix else ""
            console.print(f"{_MARKS[finding.state]}  {finding.name:<14}{escape(finding.said)}{fix}", soft_wrap=True)
    if any(finding.state == "fail" for finding in found):
        raise typer.Exit(1)
