"""Online projects: corrections of users as demonstrations, one Parquet file a round, which ``mix`` trains on.

``rft store demonstrations`` writes all of them as a dataset for supervised fine-tuning.
"""

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, Select, func, select, update
from sqlalchemy.orm import Session

from rft_platform.common.errors import UserError
from rft_platform.common.files import atomic_path, digest_file
from rft_platform.object_store.mirror import removing
from rft_platform.online.traffic.database import Call, Feedback, FeedbackCall, parts, readings, transactions
from rft_platform.online.traffic.project_traffic import traffic_database
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Demonstrations, read, write
from rft_platform.rounds.setup.demonstrations import EXPERTS
from rft_platform.tasks.messages import as_context

if TYPE_CHECKING:
    from rft_platform.training.data.conversations import Turn


_HAS_CORRECTION = (Feedback.correction.is_not(None), Feedback.correction != "")
LOG = logging.getLogger(__name__)
FILE = "demonstrations.parquet"
_JSON = ("messages", "tools")
_COLUMNS = {
    "messages": "string", "tools": "string", "msg_id": "string", "choice": "int64", "policy_version": "int64",
    "feedback_id": "string", "received_at": "float64",
}  # fmt: skip


class DemonstrationStore:
    """Demonstrations in the database of the traffic."""

    def __init__(self, engine: Engine) -> None:
        self._transaction, self._reading = transactions(engine), readings(engine)

    def settle(self, batch: int) -> list[dict[str, Any]]:
        """Assign corrections that belong to no round yet to round ``batch``; return all demonstrations of the round."""
        with self._transaction() as session:
            waiting = update(Feedback).where(*_HAS_CORRECTION, Feedback.batch.is_(None))
            session.execute(waiting.values(batch=batch).execution_options(synchronize_session=False))
            return list(_demonstrations(session, _corrected().where(Feedback.batch == batch)))

    def first_batch(self, msg_ids: Collection[str]) -> int | None:
        """The first round that took a correction of one of these messages, also if the correction was erased later."""
        with self._reading() as session:
            found = [session.scalar(_taken(part)) for part in parts(sorted(msg_ids))]
        return min((batch for batch in found if batch is not None), default=None)

    def rows(self, batch: int | None = None) -> list[dict[str, Any]]:
        """All demonstrations, or the demonstrations of round ``batch``; oldest first."""
        query = _corrected() if batch is None else _corrected().where(Feedback.batch == batch)
        with self._reading() as session:
            return list(_demonstrations(session, query))


def _taken(msg_ids: Sequence[str]) -> Select[int | None]:
    return (
        select(func.min(Feedback.batch))
        .join(FeedbackCall, FeedbackCall.feedback_id == Feedback.feedback_id)
        .join(Call, Call.number == FeedbackCall.number)
        .where(Call.msg_id.in_(msg_ids))
    )


def _corrected() -> Select[Feedback, int]:
    """Corrections with the number of the call that each is about, oldest first."""
    return (
        select(Feedback, func.max(FeedbackCall.number))
        .join(FeedbackCall, FeedbackCall.feedback_id == Feedback.feedback_id)
        .where(*_HAS_CORRECTION)
        .group_by(Feedback.feedback_id)
        .order_by(Feedback.received_at, Feedback.feedback_id)
    )


def _demonstrations(session: Session, query: Select[Feedback, int]) -> Iterator[dict[str, Any]]:
    newest = {number: feedback for feedback, number in session.execute(query)}
    for number, feedback in newest.items():
        call = session.get_one(Call, number)
        messages = call.model_call.get("messages")  # none if the call was erased
        if messages:
            yield {
                "messages": [*as_context(messages), {"role": "assistant", "content": feedback.correction}],
                "tools": call.model_call.get("tools") or None,
                "msg_id": call.msg_id,
                "choice": call.choice,
                "policy_version": call.policy_version,
                "feedback_id": feedback.feedback_id,
                "received_at": feedback.received_at,
            }


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
            _remove(target)
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
            _remove(experts)  # a training writes it again
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
        _remove(file)
    written = Demonstrations(len(rows), digest_file(file) if rows else None)
    write(project.store, round_number, written)
    return written


def _remove(file: Path) -> None:
    with removing(file):
        file.unlink(missing_ok=True)


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
