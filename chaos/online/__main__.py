"""``python -m chaos.online``: kill the online service at seeded moments, and check what it acknowledged."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from chaos.online.campaign import MOST_FAULTS, Campaign
from rft_platform.cli.exits import exit_codes
from rft_platform.common.errors import RftError
from rft_platform.common.files import write_json
from rft_platform.driver.console import notes, output
from rft_platform.driver.preflight import refuse_bad_target
from rft_platform.recipes.arithmetic.model import build_model

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def online(
    moments: Annotated[int, typer.Option(min=0, help="Kills and disturbances.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Decides what happens, and when.")] = 0,
    faults: Annotated[
        int,
        typer.Option(min=0, max=MOST_FAULTS, help="Kinds of failing system calls besides (they need a C compiler)."),
    ] = MOST_FAULTS,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.", show_default=False)
    ] = None,
) -> None:
    """Kill a service with customers at seeded moments, break its database, and check what is left. Takes minutes."""
    with exit_codes():
        refuse_bad_target(json_file)
        console = notes()
        with tempfile.TemporaryDirectory(prefix="rft-chaos-online-") as folder:
            work = Path(folder)
            model = build_model(work / "model")
            campaign = Campaign(work, model, seed, lambda line: console.print(line, markup=False, soft_wrap=True))
            report = {
                "what": "seeded kills and faults of the online service, then the invariants of docs/chaos.md",
                "machine": {"cpus": os.cpu_count(), "load_1_min": round(os.getloadavg()[0], 1)},
                **campaign.run(moments, faults),
            }
        if json_file is not None:
            write_json(json_file, report)
        output().print(report, markup=False)
        if report["violations"]:
            raise RftError(f"{len(report['violations'])} invariants were violated")


if __name__ == "__main__":
    app()
