"""``python -m chaos.online``: kill the online service at seeded moments, and check what it acknowledged."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from chaos.online.campaign import MOST_FAULTS, Campaign
from chaos.online.served import ServedCampaign
from rft_platform.cli.exits import exit_codes
from rft_platform.cluster.this_process import terminable
from rft_platform.common.errors import RftError
from rft_platform.common.files import write_json
from rft_platform.recipes.tiny_model import build_model
from rft_platform.run.console import notes, output, refuse_bad_target

_ECHOED = "seeded kills and faults of the online service, then the invariants of docs/chaos.md"
_SERVED = "seeded kills of the processes of `rft serve`, then the invariants of docs/chaos.md"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def online(
    moments: Annotated[int, typer.Option(min=0, help="Kills and disturbances.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Decides what happens, and when.")] = 0,
    faults: Annotated[
        int,
        typer.Option(min=0, max=MOST_FAULTS, help="Kinds of failing system calls besides (they need a C compiler)."),
    ] = MOST_FAULTS,
    served: Annotated[
        bool, typer.Option("--served", help="Kill service, engine, trainer and daemon of a real `rft serve` instead.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.", show_default=False)
    ] = None,
) -> None:
    """Kill a service with customers at seeded moments, break its database, and check what is left. Takes minutes."""
    with exit_codes(), terminable():
        refuse_bad_target(json_file)
        console = notes()
        with tempfile.TemporaryDirectory(prefix="rft-chaos-online-") as folder:
            work = Path(folder)
            found = _run(work, moments, seed, faults, served, lambda line: console.print(line, markup=False))
            report = {
                "what": _SERVED if served else _ECHOED,
                "machine": {"cpus": os.cpu_count(), "load_1_min": round(os.getloadavg()[0], 1)},
                **found,
            }
        if json_file is not None:
            write_json(json_file, report)
        output().print(report, markup=False)
        if report["violations"]:
            raise RftError(f"{len(report['violations'])} invariants were violated")


def _run(work: Path, moments: int, seed: int, faults: int, served: bool, log: Callable[[str], None]) -> dict[str, Any]:
    if served:
        return ServedCampaign(work, seed, log).run(moments)
    return Campaign(work, build_model(work / "model"), seed, log).run(moments, faults)


if __name__ == "__main__":
    app()
