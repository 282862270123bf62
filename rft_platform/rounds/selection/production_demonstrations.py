"""Online projects: corrections of users as demonstrations, one Parquet file a round, which ``mix`` trains on.

``rft store demonstrations`` writes all of them as a dataset for supervised fine-tuning.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rft_platform.common.files import atomic_path, digest_file
from rft_platform.rounds.project.notes import DEMONSTRATIONS
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.selection.production_rows import traffic_database
from rft_platform.serving.reports.demonstrations import DemonstrationStore

FILE = "demonstrations.parquet"
CORRECTIONS_UNTIL = "corrections_until"  #: lineage: the training read the demonstrations of all rounds up to this one
_JSON = ("messages", "tools")
_COLUMNS = {
    "messages": "string", "tools": "string", "msg_id": "string", "choice": "int64", "policy_version": "int64",
    "feedback_id": "string", "received_at": "float64",
}  # fmt: skip


def collect_demonstrations(project: Project, round_number: int) -> dict[str, Any]:
    """Write the corrections that no round before took to the round's folder; returns the note.

    Once the note is written, a repeated call changes nothing. A damaged or missing file is written again.
    """
    store, file = project.store, project.store.round_folder(round_number) / FILE
    known = store.read_note(round_number, DEMONSTRATIONS)
    if known is not None and (not known["rows"] or (file.exists() and digest_file(file) == known["sha256"])):
        return dict(known)
    database = DemonstrationStore(traffic_database(project))
    rows = database.settle(round_number) if known is None else database.rows(round_number)
    note = _write(project, round_number, rows)
    kept = database.rows(round_number)
    # a person was forgotten meanwhile, before `rft forget` could find the file
    return note if len(kept) == len(rows) else _write(project, round_number, kept)


def trains_on_corrections(project: Project) -> bool:
    """Whether the rounds of the project mix corrections of users into their rows."""
    experts = project.config.algorithm.experts
    return project.config.online and experts is not None and experts.path is None


def experts_of_traffic(project: Project, round_number: int, target: Path) -> int:
    """Write the demonstrations of this round and all before it to ``target``; returns their number."""
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for number in range(1, round_number + 1):
        if project.store.has_note(number, DEMONSTRATIONS) and collect_demonstrations(project, number)["rows"]:
            for row in _read(project.store.round_folder(number) / FILE):
                newest[row["msg_id"], row["choice"]] = row
    if newest:
        _write_file(list(newest.values()), target)
    return len(newest)


def erase_demonstrations(project: Project, msg_ids: Collection[str]) -> list[int]:
    """Erase the demonstrations of these messages from all files; returns the rounds that held one."""
    held = []
    for number in project.store.rounds():
        note = project.store.read_note(number, DEMONSTRATIONS)
        file = project.store.round_folder(number) / FILE
        if note is None or not note["rows"]:
            continue
        rows = _read(file) if file.exists() else []
        kept = [row for row in rows if row["msg_id"] not in msg_ids]
        if len(kept) < len(rows):
            held.append(number)
            _write(project, number, kept)
    if held:
        shared_experts_file(project).unlink(missing_ok=True)
    return held


def shared_experts_file(project: Project) -> Path:
    """The file of demonstrations that a training with ``mix`` reads; each training writes it anew."""
    return project.store.round_folder(0) / "experts.parquet"


def _write(project: Project, round_number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write a round's file, and the note about it."""
    file = project.store.round_folder(round_number) / FILE
    if rows:
        _write_file(rows, file)
    else:
        file.unlink(missing_ok=True)
    note = {"rows": len(rows), "sha256": digest_file(file) if rows else None}
    project.store.write_note(round_number, DEMONSTRATIONS, note)
    return note


def _write_file(rows: list[dict[str, Any]], target: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = {name: [_cell(name, row[name]) for row in rows] for name in _COLUMNS}
    table = pa.table({name: pa.array(cells[name], pa.type_for_alias(kind)) for name, kind in _COLUMNS.items()})
    with atomic_path(target) as temp:
        pq.write_table(table, temp, compression="zstd")


def _read(file: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def _cell(name: str, value: Any) -> Any:
    is_text = value is None or isinstance(value, str)
    return value if name not in _JSON or is_text else json.dumps(value, ensure_ascii=False)
