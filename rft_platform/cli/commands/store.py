"""``rft store``: maintain the stored rows (compaction, retention, verification); export feedback."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rft_platform.rounds.maintenance.store_maintenance import Upkeep
    from rft_platform.rounds.project.project import Project

store = typer.Typer(no_args_is_help=True, help="Compact, retain or check the stored rows.")

_DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Grace = Annotated[
    float,
    typer.Option(
        "--grace-s", min=0.0, help="Seconds to keep replaced or retired files for readers that still use them."
    ),
]


@store.command()
def compact(
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=0, help="Number of newest closed rounds to leave unchanged.")
    ] = 2,
    grace_s: _Grace = 3600.0,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Merge the explore batches of each closed round into one file; rows, ids and digests do not change."""
    from rft_platform.rounds.maintenance.store_maintenance import compact as compact_project

    project = _project()
    _report(compact_project(project, keep_last=keep_last, grace_s=grace_s, dry_run=dry_run), as_json)


@store.command()
def retain(
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=0, help="Number of newest closed rounds to keep.")
    ] = None,
    older_than_days: Annotated[
        float | None, typer.Option("--older-than-days", min=0.0, help="Keep rounds younger than this number of days.")
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option("--archive", help="Copy the rollouts to this folder first; without it they are deleted."),
    ] = None,
    champion_too: Annotated[
        bool, typer.Option("--champion-too", help="Also retire rounds that the champion was trained on.")
    ] = False,
    grace_s: _Grace = 3600.0,
    dry_run: _DryRun = False,
    as_json: _Json = False,
) -> None:
    """Delete or archive the rollouts of old rounds; judgements, notes and digests stay, so `rft trace` still works."""
    from rft_platform.rounds.maintenance.store_maintenance import retain as retain_rounds
    from rft_platform.rounds.setup.connections import connect_registry

    project = _project()
    report = retain_rounds(
        project,
        connect_registry(project),
        keep_last=keep_last,
        older_than_days=older_than_days,
        archive=archive,
        champion_too=champion_too,
        grace_s=grace_s,
        dry_run=dry_run,
    )
    _report(report, as_json)


@store.command()
def check(
    fast: Annotated[bool, typer.Option("--fast", help="Compare sizes and footers only, not every byte.")] = False,
    set_aside: Annotated[
        bool,
        typer.Option("--set-aside", help="Move damaged files to aside/; an unfinished round then creates them again."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Compare every file, note and checkpoint with its digest; exit code 1 if any is damaged."""
    from rft_platform.experience.file_names import round_number
    from rft_platform.rounds.maintenance.verification import verify
    from rft_platform.rounds.project.record import set_aside as set_file_aside
    from rft_platform.run.console import notes, output, print_json

    project = _project()
    found = verify(project, digest=not fast)
    if as_json:
        print_json(found.to_json())
    else:
        console = output()
        counts = (
            f"{found.rounds:,} rounds, {found.files:,} files, {found.notes:,} notes, {found.checkpoints:,} checkpoints"
        )
        console.print(f"{counts}, {found.bytes / 1e6:,.1f} MB", markup=False)
        if not found.damaged and not found.changed:
            console.print("every size is as recorded" if fast else "every digest matches", markup=False)
        for file in found.damaged:
            console.print(f"damaged: {file.path}: {file.why}", style="red", markup=False, soft_wrap=True)
        for text in found.changed:
            console.print(f"changed: {text}", style="yellow", markup=False, soft_wrap=True)
    if set_aside:
        for file in found.damaged:
            if file.path.is_relative_to(project.store.root):
                number = round_number(file.path.relative_to(project.store.root).parts[0])
                if project.store.restore(number, file.path):
                    notes().print(f"restored from the object store: {file.path}", markup=False, soft_wrap=True)
                else:
                    set_file_aside(project.store, number, file)
    if found.damaged:
        raise typer.Exit(1)


def _project() -> "Project":
    from rft_platform.config.home import Home
    from rft_platform.online.project import open_project

    return open_project(Home.from_environment())


@store.command()
def preferences(
    file: Annotated[Path, typer.Argument(help="JSON Lines file to write.")],
    ratings: Annotated[
        bool, typer.Option("--ratings", help="Write rated answers without a partner instead, for KTO.")
    ] = False,
    threshold: Annotated[
        float, typer.Option(help="With --ratings: an answer with at least this reward is desirable.")
    ] = 0.5,
) -> None:
    """Write the preference pairs that people picked on the online service's page, as a dataset for DPO."""
    from rft_platform.online.traffic.preferences import PreferenceStore
    from rft_platform.online.traffic.project_traffic import traffic_database

    found = PreferenceStore(traffic_database(_online_project()))
    if ratings:
        _write_dataset(found.rated_answers(threshold), file, "rated answers")
    else:
        _write_dataset(found.pairs(), file, "preference pairs")


@store.command()
def demonstrations(file: Annotated[Path, typer.Argument(help="JSON Lines file to write.")]) -> None:
    """Write the corrections that users gave in their feedback, as a dataset for supervised fine-tuning."""
    from rft_platform.online.traffic.demonstrations import DemonstrationStore
    from rft_platform.online.traffic.project_traffic import traffic_database

    _write_dataset(DemonstrationStore(traffic_database(_online_project())).rows(), file, "demonstrations")


def _online_project() -> "Project":
    from rft_platform.common.errors import UserError

    project = _project()
    if project.traffic is None:
        raise UserError("this project serves no production traffic: start one with `rft serve`")
    return project


def _write_dataset(rows: list[dict[str, Any]], file: Path, name: str) -> None:
    import json

    from rft_platform.common.files import atomic_path
    from rft_platform.run.console import output, writing

    with writing(file), atomic_path(file) as temp:
        temp.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    output().print(f"{len(rows):,} {name} written to {file}", markup=False, soft_wrap=True)


def _report(report: "Upkeep", as_json: bool) -> None:
    """Print the changes that were made; exit code 1 if a round could not be processed."""
    from rft_platform.run.console import output, print_json

    if as_json:
        print_json(report)
    else:
        console = output()
        for line in _lines(report):
            console.print(line, markup=False, soft_wrap=True)
    if report.problems:
        raise typer.Exit(1)


def _lines(report: "Upkeep") -> list[str]:
    done = "would be " if report.dry_run else ""
    lines = []
    if report.rewrites:
        files, rows = sum(len(r.replaced) for r in report.rewrites), sum(r.rows for r in report.rewrites)
        lines.append(f"{files:,} files {done}rewritten as {len(report.rewrites):,}, {rows:,} rows")
    if report.retirements:
        rows, size = sum(r.rows for r in report.retirements), sum(r.bytes for r in report.retirements)
        where = report.retirements[0].archived_to
        what = f"archived to {Path(where).parent}" if where else "retired"
        lines.append(f"{rows:,} rollout rows of {len(report.retirements):,} rounds {done}{what} ({size / 1e6:,.1f} MB)")
    if report.protected:
        lines.append(f"{len(report.protected):,} rounds kept for the champion (--champion-too retires them)")
    if report.orphans:
        lines.append(f"{report.orphans:,} objects of interrupted uploads {done}removed from the object store")
    if report.freed_bytes:
        lines.append(f"{report.freed_bytes / 1e6:,.1f} MB {done}freed")
    return [*(lines or ["nothing to do"]), *(f"not changed: {problem}" for problem in report.problems)]
