"""The consoles that commands print to. Colour only on a terminal, never with NO_COLOR; secrets are masked."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.observability.masked_output import masked, unmasked

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 160  # a pipe has no width, and tables must not be cut


def output() -> "Console":
    """The console of results: standard output."""
    return _console(stderr=False)


def notes() -> "Console":
    """The console of progress and notes: standard error, so that results can be piped."""
    return _console(stderr=True)


def print_unmasked(name: str, text: str) -> None:
    """Print a line that masking would make useless: a link with its access token, or a command that names a token."""
    print(f"{name:<10} {text}", file=unmasked(sys.stdout), flush=True)


def print_json(value: Any) -> None:
    """Print one JSON document to standard output."""
    import json

    import typer

    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def refuse_bad_target(json_file: Path | None) -> None:
    """Raise UserError if ``json_file`` cannot be written. Called before a run, which takes minutes."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"--json {json_file}: its folder does not exist; create it first")
    if json_file is not None and json_file.is_dir():
        raise UserError(f"--json {json_file}: this is a folder; give a file")


def _console(stderr: bool) -> "Console":
    from rich.console import Console

    # Use the current stream: a drive redirects all other output to a log.
    file = masked(sys.stderr if stderr else sys.stdout)
    console = Console(file=file, highlight=False)
    if console.is_terminal and not console.is_jupyter:
        return console
    # A notebook gets plain lines: a live table needs ipywidgets there and warns at each refresh without them.
    return Console(file=file, highlight=False, width=_PLAIN_WIDTH, force_terminal=False, force_jupyter=False)
