"""The ``rft`` command and its subcommands. Heavy imports are inside the commands, so that ``rft --help`` is fast."""

import difflib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rft_platform.cli.commands.config import config
from rft_platform.cli.commands.debug import debug
from rft_platform.cli.commands.demo import demo, new, recipe
from rft_platform.cli.commands.doctor import doctor
from rft_platform.cli.commands.evaluate import evaluate
from rft_platform.cli.commands.imports import import_traces, receive
from rft_platform.cli.commands.judge import judge
from rft_platform.cli.commands.models import models
from rft_platform.cli.commands.online import forget, serve
from rft_platform.cli.commands.prompt import prompt
from rft_platform.cli.commands.rounds import rounds
from rft_platform.cli.commands.run import run
from rft_platform.cli.commands.servers import engine, metrics, stop, ui, view
from rft_platform.cli.commands.store import store
from rft_platform.cli.commands.trace import trace
from rft_platform.cli.commands.tune import tune
from rft_platform.cli.exits import exit_codes
from rft_platform.common.errors import UserError
from rft_platform.config.home import Home, private_files
from rft_platform.observability.masked_output import mask_output

#: Names that users of other tools try, and the command that does it here.
_OTHER_NAMES = {"train": "run", "start": "run", "resume": "run", "status": "rounds", "evaluate": "eval"}


class _Commands(TyperGroup):
    """The group of subcommands; each of them ends with the exit codes of ``exits``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and (near := difflib.get_close_matches(args[0], _OTHER_NAMES, 1, cutoff=0.8)):
            raise UserError(f"no such command {args[0]!r}; did you mean `rft {_OTHER_NAMES[near[0]]}`?")
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_without_type(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        for each in (command, *getattr(command, "commands", {}).values()) if command is not None else ():
            _flags_without_type(each.get_params(ctx))
        return command

    def invoke(self, ctx: Any) -> Any:
        with exit_codes(), private_files():
            if (line := Home.from_environment().make_private()) is not None:
                typer.echo(f"note: {line}", err=True)
            return super().invoke(ctx)


def _flags_without_type(parameters: list[Any]) -> list[Any]:
    """Make ``--help`` print flags without ``<bool>``, because they take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rft_platform {version('rft-platform')}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement fine-tuning for LLM agents, orchestrated by Dagster. State lives in RFT_HOME (default ./.rft).",
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of ``rft`` itself."""


app.command()(new)
app.command()(demo)
app.command()(recipe)
app.command()(run)
app.command()(tune)
app.command()(ui)
app.command()(serve)
app.command()(doctor)
app.add_typer(debug, name="debug")
app.add_typer(config, name="config")
app.command("eval")(evaluate)
app.add_typer(prompt, name="prompt")
app.command()(rounds)
app.command()(judge)
app.command("import")(import_traces)
app.command()(receive)
app.command()(trace)
app.command()(forget)
app.add_typer(store, name="store")
app.add_typer(models, name="models")
app.command()(view)
app.command()(metrics)
app.command()(engine)
app.command()(stop)


def main() -> None:
    """Entry point of the console script."""
    mask_output()
    app()
