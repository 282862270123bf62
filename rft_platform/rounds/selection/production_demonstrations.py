"""Online projects: corrections of users as demonstrations, one Parquet file a round, which ``mix`` trains on.

``rft store demonstrations`` writes all of them as a dataset for supervised fine-tuning.
"""

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import atomic_path, digest_file
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Demonstrations, read, write
from rft_platform.rounds.selection.production_rows import traffic_database
from rft_platform.serving.reports.demonstrations import DemonstrationStore

if TYPE_CHECKING:
    from rft_platform.training.data.conversations import Turn

LOG = logging.getLogger(__name__)
FILE = "demonstrations.parquet"
EXPERTS = "experts.parquet"  #: what the round's training mixes into its rows
CORRECTIONS_UNTIL = "corrections_until"  #: lineage: the training read the demonstrations of all rounds up to this one
_JSON = ("messages", "tools")
_COLUMNS = {
    "messages": "string", "tools": "string", "msg_id": "string", "choice": "int64", "policy_version": "int64",
    "feedback_id": "string", "received_at": "float64",
}  # fmt: skip


def collect_demonstrations(project: Project, round_number: int) -> Demonstrations:
    """Write the corrections that no round before took to the round's folder.

    Once they are recorded, a repeated call changes nothing. A damaged or missing file is written again.
    """
    known, file = read(project.store, round_number).demonstrations, project.store.round_folder(round_number) / FILE
    if known is not None and (not known.rows or (file.exists() and digest_file(file) == known.sha256)):
        return known
    database = DemonstrationStore(traffic_database(project))
    rows = database.settle(round_number) if known is None else database.rows(round_number)
    written = _write(project, round_number, rows)
    kept = database.rows(round_number)
    # `rft forget` ran before the file existed, so it did not erase the person's rows in it
    return written if len(kept) == len(rows) else _write(project, round_number, kept)


def trains_on_corrections(project: Project) -> bool:
    """Whether the rounds of the project mix corrections of users into their rows."""
    experts = project.config.algorithm.experts
    return project.config.online and experts is not None and experts.path is None


def experts_of_traffic(project: Project, round_number: int, model_folder: Path) -> Path | None:
    """Write the demonstrations of all rounds up to this one for its training; returns the file, None if there are none.

    Each round has its own file, so that a killed trainer can repeat the training. Demonstrations that the model at
    ``model_folder`` cannot be trained on are left out, because one bad correction must not stop the project.
    """
    target, limit = project.store.round_folder(round_number) / EXPERTS, project.config.model.max_model_len
    while True:
        rows = _until(project, round_number)
        usable = _trainable(rows, model_folder, limit)
        if usable:
            _write_file(usable, target)
        else:
            target.unlink(missing_ok=True)
        if _until(project, round_number) == rows:  # otherwise `rft forget` removed rows while the file was written
            return target if usable else None


def erase_demonstrations(project: Project, msg_ids: Collection[str]) -> int | None:
    """Erase the demonstrations of these messages from all files; returns the first round that has one, or None."""
    for number in project.store.rounds():
        known = read(project.store, number).demonstrations
        file, experts = (project.store.round_folder(number) / name for name in (FILE, EXPERTS))
        if known is not None and known.rows:
            rows = _read(file) if file.exists() else []
            kept = [row for row in rows if row["msg_id"] not in msg_ids]
            if len(kept) < len(rows):
                _write(project, number, kept)
        if experts.exists() and any(row["msg_id"] in msg_ids for row in _read(experts)):
            experts.unlink()  # a training writes it again
    return DemonstrationStore(traffic_database(project)).first_batch(msg_ids)


def _until(project: Project, round_number: int) -> list[dict[str, Any]]:
    """The demonstrations of all rounds up to this one; if an answer has several corrections, the newest one."""
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for number in range(1, round_number + 1):
        if read(project.store, number).has(Demonstrations) and collect_demonstrations(project, number).rows:
            for row in _read(project.store.round_folder(number) / FILE):
                newest[row["msg_id"], row["choice"]] = row
    return list(newest.values())


def _trainable(rows: list[dict[str, Any]], model_folder: Path, limit: int | None) -> list[dict[str, Any]]:
    """The demonstrations of at most ``limit`` tokens that the model's chat template renders."""
    from rft_platform.training.data.conversations import tokenise

    if not rows:
        return []
    turns = [_turn(row) for row in rows]
    try:
        lengths: list[int | None] = [len(prompt) + len(answer) for prompt, answer in tokenise(turns, model_folder)]
    except UserError:  # find out which demonstrations the template refuses
        lengths = [_tokens(turn, model_folder) for turn in turns]
    fits = [length is not None and (limit is None or length <= limit) for length in lengths]
    if not all(fits):
        LOG.warning("%d of %d corrections are too long or refused by the chat template", fits.count(False), len(rows))
    return [row for row, each in zip(rows, fits, strict=True) if each]


def _turn(row: dict[str, Any]) -> "Turn":
    from rft_platform.training.data.conversations import Turn

    messages, tools = json.loads(row["messages"]), json.loads(row["tools"]) if row["tools"] else None
    return Turn(f"the correction {row['feedback_id']}", messages[:-1], messages[-1], tools)


def _tokens(turn: "Turn", model_folder: Path) -> int | None:
    from rft_platform.training.data.conversations import tokenise

    try:
        ((prompt, answer),) = tokenise([turn], model_folder)
    except UserError as error:
        LOG.warning("%s", error)
        return None
    return len(prompt) + len(answer)


def _write(project: Project, round_number: int, rows: list[dict[str, Any]]) -> Demonstrations:
    """Write a round's file, and record it."""
    file = project.store.round_folder(round_number) / FILE
    if rows:
        _write_file(rows, file)
    else:
        file.unlink(missing_ok=True)
    written = Demonstrations(len(rows), digest_file(file) if rows else None)
    write(project.store, round_number, written)
    return written


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
