"""``rft doctor``: check everything that a run needs, and print how to fix what is missing."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

_MARKS = {"note": "[green]ok[/]  ", "warning": "[yellow]warn[/]", "error": "[red]fail[/]"}


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Check this file instead of the project's configuration.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check versions, devices, processes, ports and the project's folder; print a fix for each problem."""
    from rich.markup import escape

    from rft_platform.config.findings import has_errors
    from rft_platform.config.home import Home
    from rft_platform.run.checks import doctor_checks
    from rft_platform.run.console import output, print_json
    from rft_platform.run.start import use_home

    home = Home.from_environment()
    use_home(home)
    checks = doctor_checks(config)
    found = list(dict.fromkeys(finding for check in checks for finding in check(home)))  # a full disk is found twice
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        console = output()
        for finding in found:
            about = "" if finding.text.startswith(finding.key) else f"{finding.key:<14}"
            console.print(f"{_MARKS[finding.level]}  {about}{escape(finding.text)}", soft_wrap=True)
    if has_errors(found):
        raise typer.Exit(1)
