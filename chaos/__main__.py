"""``python -m chaos``: kill processes of a scratch project at seeded moments, and check that it recovers."""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from chaos.campaign import run_chaos
from chaos.records import summary
from chaos.schedule import TARGETS, check_targets
from chaos.scratch import make_scratch
from rft_platform.cli.exits import exit_codes
from rft_platform.cluster.this_process import terminable
from rft_platform.common.errors import RftError
from rft_platform.common.files import write_json
from rft_platform.run.console import notes, output, refuse_bad_target

if TYPE_CHECKING:
    from chaos.ray_platform import RayPlatform

_ALL = "driver,engine,trainer,daemon,webserver,run_worker,code_server,mlflow"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def chaos(
    kills: Annotated[int, typer.Option(min=1, help="Kills over the whole run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Decides victims, moments and signals.")] = 0,
    targets: Annotated[
        str, typer.Option(help="What is killed, separated by commas; default: everything.", show_default=False)
    ] = "",
    on_ray: Annotated[
        bool, typer.Option("--ray", help="Run the projects on three raylets, with S3 and Postgres (`make test-s3`).")
    ] = False,
    io_faults: Annotated[
        int,
        typer.Option(min=0, help="File system faults in the processes of either mode besides (needs a C compiler)."),
    ] = 0,
    side_by_side: Annotated[
        bool, typer.Option("--side-by-side", help="Run both modes at the same time: faster, but slower recoveries.")
    ] = False,
    work: Annotated[
        Path | None, typer.Option(help="Folder of the scratch projects; default: a temporary one.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every kill and the result to this file.", show_default=False)
    ] = None,
) -> None:
    """Kill processes of a temporary project at seeded moments, let it finish, and check the results. Takes minutes."""
    with exit_codes():
        refuse_bad_target(json_file)
        named = targets or (",".join(TARGETS["ray"]) if on_ray else _ALL)
        chosen = check_targets([name.strip() for name in named.split(",") if name.strip()])
        folder = Path(tempfile.mkdtemp(prefix="rft-chaos-")) if work is None else work
        report = _run(folder, kills, seed, chosen, io_faults, side_by_side, on_ray)
        if json_file is not None:
            write_json(json_file, report)
        _print(report)
        if report["violations"]:
            raise RftError(f"{len(report['violations'])} invariants were violated; the projects are in {folder}")
        if work is None:
            shutil.rmtree(folder)
        output().print(f"every invariant holds after {report['kills']} kills", markup=False)


def _run(
    folder: Path, kills: int, seed: int, targets: list[str], io_faults: int, side_by_side: bool, on_ray: bool
) -> dict[str, Any]:
    """Run the campaign in ``folder``; returns its report."""
    scratch, console, began = make_scratch(folder, workers=on_ray), notes(), time.perf_counter()

    def log(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    try:
        with terminable(), _platform(on_ray, seed) as ray:
            outcomes = run_chaos(scratch, kills, seed, targets, log, side_by_side, io_faults, ray)
    except KeyboardInterrupt:
        log(f"interrupted: the scratch projects have ended; their folders stay in {folder}")
        raise
    return {
        "what": "seeded kills, then an undisturbed end and the invariants of docs/chaos.md",
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "seed": seed,
        "targets": targets,
        "both_modes_at_once": side_by_side,
        "wall_s": round(time.perf_counter() - began, 1),
        **summary(outcomes),
    }


@contextmanager
def _platform(on_ray: bool, seed: int) -> Iterator["RayPlatform | None"]:
    """The cluster and the servers of projects on Ray."""
    if not on_ray:
        yield None
        return
    from chaos.ray_platform import ray_platform

    with ray_platform(seed) as running:
        yield running


def _print(report: dict[str, Any]) -> None:
    """Print the table of kills by target and phase, with the seconds until recovery, and the violations."""
    phases = list(report["by_phase"])
    table = Table("killed", *phases, "recovered in: median", "most")
    for target, count in report["by_target_and_phase"].items():
        recovery = report["recovery_s"][target]
        spread = ["–", "–"] if recovery is None else [f"{recovery['median']:.1f} s", f"{recovery['max']:.1f} s"]
        table.add_row(target, *(str(count.get(phase, "")) for phase in phases), *spread)
    output().print(table)
    for violation in report["violations"]:
        line = f"violated: {violation['invariant']}: {violation['message']} (replay: {violation['replay']})"
        output().print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
