"""The ``rft`` command and its subcommands. Heavy imports stand inside the commands: ``rft --help`` is instant."""

from typing import Any

import typer
from typer.core import TyperGroup

from rft_platform.cli.demo import demo
from rft_platform.cli.doctor import doctor
from rft_platform.cli.evaluate import evaluate
from rft_platform.cli.exits import exit_codes
from rft_platform.cli.rounds import rounds
from rft_platform.cli.run import run
from rft_platform.cli.stop import stop
from rft_platform.cli.trace import trace
from rft_platform.cli.ui import ui


class _Commands(TyperGroup):
    """Every subcommand ends with the exit codes of ``exits``."""

    def invoke(self, ctx: Any) -> Any:
        with exit_codes():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement fine-tuning for LLM agents, orchestrated by Dagster. State lives in RFT_HOME (default ./.rft).",
)

app.command()(demo)
app.command()(run)
app.command()(ui)
app.command()(doctor)
app.command("eval")(evaluate)
app.command()(rounds)
app.command()(trace)
app.command()(stop)


def main() -> None:
    """Entry point of the console script."""
    app()
