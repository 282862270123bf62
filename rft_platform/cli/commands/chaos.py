"""``rft chaos``: kill processes of a scratch project at seeded moments, and check that it recovers."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

_ALL = "driver,engine,trainer,daemon,webserver,run_worker,code_server,mlflow"


def chaos(
    kills: Annotated[int, typer.Option(min=1, help="Kills over the whole run.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Decides victims, moments and signals.")] = 0,
    targets: Annotated[str, typer.Option(help="What is killed, separated by commas.")] = _ALL,
    io_faults: Annotated[
        int, typer.Option(min=0, help="File system faults in driver and trainer besides (needs a C compiler).")
    ] = 0,
    work: Annotated[
        Path | None, typer.Option(help="Folder of the scratch projects; default: a temporary one.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every kill and the result to this file.", show_default=False)
    ] = None,
) -> None:
    """Kill processes of a temporary project at seeded moments, let it finish, and check the results. Takes minutes."""
    from rft_platform.chaos.records import summary
    from rft_platform.chaos.runs import run_chaos
    from rft_platform.chaos.schedule import check_targets
    from rft_platform.chaos.scratch import make_scratch
    from rft_platform.driving.console import notes, output
    from rft_platform.driving.preflight import refuse_bad_target
    from rft_platform.errors import RftError
    from rft_platform.files import write_json
    from rft_platform.processes.signals import terminable

    refuse_bad_target(json_file)
    chosen = check_targets([name.strip() for name in targets.split(",") if name.strip()])
    folder = Path(tempfile.mkdtemp(prefix="rft-chaos-")) if work is None else work
    scratch = make_scratch(folder)
    console = notes()
    try:
        with terminable():
            outcomes = run_chaos(
                scratch,
                kills,
                seed,
                chosen,
                lambda line: console.print(line, markup=False, soft_wrap=True),
                io_faults=io_faults,
            )
    except KeyboardInterrupt:
        console.print(f"interrupted: the scratch projects have ended; their folders stay in {folder}", markup=False)
        raise
    result = summary(outcomes)
    if json_file is not None:
        write_json(json_file, {"seed": seed, "targets": chosen, **result})
    output().print(_table(result))
    violations = [violation for outcome in outcomes for violation in outcome.violations]
    for violation in violations:
        output().print(f"violated: {violation}", markup=False, soft_wrap=True)
    if violations:
        raise RftError(f"{len(violations)} invariants were violated; the projects are in {folder}")
    if work is None:
        shutil.rmtree(folder)
    output().print(f"every invariant holds after {result['kills']} kills", markup=False)


def _table(result: dict[str, Any]) -> "Table":
    """Table of kills by target and phase, with the seconds until recovery."""
    from rich.table import Table

    phases = list(result["by_phase"])
    table = Table("killed", *phases, "recovered in: median", "most")
    for target, count in result["by_target_and_phase"].items():
        recovery = result["recovery_s"][target]
        spread = ["–", "–"] if recovery is None else [f"{recovery['median']:.1f} s", f"{recovery['max']:.1f} s"]
        table.add_row(target, *(str(count.get(phase, "")) for phase in phases), *spread)
    return table
