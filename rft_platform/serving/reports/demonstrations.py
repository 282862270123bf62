"""Corrections of users as demonstrations: the messages of the corrected call and the answer that the user wanted.

A correction of several calls corrects the last call, which gave the final answer. If a call has several corrections,
the newest counts. A round takes the corrections that no earlier round took.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import Engine, Select, func, select, update
from sqlalchemy.orm import Session

from rft_platform.serving.database import Call, Feedback, FeedbackCall, readings, transactions
from rft_platform.tasks.messages import as_context

_IDS_A_QUERY = 500
_HAS_CORRECTION = (Feedback.correction.is_not(None), Feedback.correction != "")


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
            found = [session.scalar(_taken(part)) for part in _parts(sorted(msg_ids))]
        return min((batch for batch in found if batch is not None), default=None)

    def rows(self, batch: int | None = None) -> list[dict[str, Any]]:
        """All demonstrations, or the demonstrations of round ``batch``; oldest first."""
        query = _corrected() if batch is None else _corrected().where(Feedback.batch == batch)
        with self._reading() as session:
            return list(_demonstrations(session, query))


def _parts(msg_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (msg_ids[start : start + _IDS_A_QUERY] for start in range(0, len(msg_ids), _IDS_A_QUERY))


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
