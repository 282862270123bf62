"""The consoles that commands print to. Colour only on a terminal, never with NO_COLOR; secrets are masked."""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.observability.masked_output import masked, unmasked

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_WIDTH = 160  # a pipe has no width, and tables must not be cut


def output() -> "Console":
    """The console of results: standard output."""
    return _console(stderr=False)


def notes() -> "Console":
    """The console of progress and notes: standard error, so that results can be piped."""
    return _console(stderr=True)


def table(*columns: str, left: Collection[str] = (), title: str | None = None, **options: Any) -> "Table":
    """An empty table. Columns are aligned right, except those named in ``left``; ``options`` are those of a column."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right", **options)
    return made


def print_unmasked(name: str, text: str) -> None:
    """Print a line that masking would make useless: a link with its access token, or a command that names a token."""
    print(f"{name:<10} {text}", file=unmasked(sys.stdout), flush=True)


def print_links(links: Sequence[tuple[str, str]], token_file: Path) -> None:
    """Print a line for each name and link; the links keep the access token where only the user reads them.

    Output that is no terminal is kept, as a log for example, and a token of the environment is one that the user has:
    the links are then printed without it, and a last line says where the token is.
    """
    from rft_platform.web_guard.asgi import without_token
    from rft_platform.web_guard.token import TOKEN_VARIABLE

    given = os.environ.get(TOKEN_VARIABLE)
    shown = links if sys.stdout.isatty() and not given else [(name, without_token(link)) for name, link in links]
    for name, link in shown:
        print_unmasked(name, link)
    if shown != links:
        print_unmasked("token", f"the value of {TOKEN_VARIABLE}" if given else f"in {token_file}")


def print_json(value: Any) -> None:
    """Print one JSON document to standard output; a dataclass is an object of its fields."""
    import json

    import typer

    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=asdict))


def refuse_bad_target(json_file: Path | None) -> None:
    """Raise UserError if ``json_file`` cannot be written. Called before a run, which takes minutes."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"--json {json_file}: its folder does not exist; create it first")
    if json_file is not None and json_file.is_dir():
        raise UserError(f"--json {json_file}: this is a folder; give a file")


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes ``target`` for the user, into a UserError that names it."""
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise UserError(
            f"{target}: cannot be written ({reason}): give a path in a folder that you can write to"
        ) from problem


def _console(stderr: bool) -> "Console":
    from rich.console import Console

    # Use the current stream: a drive redirects all other output to a log.
    file = masked(sys.stderr if stderr else sys.stdout)
    console = Console(file=file, highlight=False)
    if console.is_terminal and not console.is_jupyter:
        return console
    # A notebook gets plain lines: a live table needs ipywidgets there and warns at each refresh without them.
    return Console(file=file, highlight=False, width=_PLAIN_WIDTH, force_terminal=False, force_jupyter=False)
