"""Erase texts and tokens of production traffic: of old calls without a reward, and of a person who asks for it."""

import hashlib
import time
from collections.abc import Callable

from sqlalchemy import Engine, or_, select, update
from sqlalchemy.orm import defer

from rft_platform.common.errors import StorageError, UserError
from rft_platform.serving.database import (
    COMMITTED,
    EXPIRED,
    FORGOTTEN,
    RECORDED,
    STALE,
    UNTRAINABLE,
    Call,
    Feedback,
    FeedbackCall,
    transactions,
)
from rft_platform.serving.preferences import Preference


class TrafficErasure:
    """Erases calls in the database of the traffic, by age or by person. An erased row stays, without its content."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._transaction = transactions(engine)
        self._clock = clock

    def expire(self, older_than_s: float) -> int:
        """Erase calls that were recorded more than ``older_than_s`` seconds ago and have no reward or are stale.

        Returns their number. Calls with a correction stay: they are demonstrations.
        """
        corrected = (
            select(FeedbackCall.number)
            .join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
            .where(FeedbackCall.number == Call.number, Feedback.correction.is_not(None))
        )
        with self._transaction() as session:
            done = session.execute(
                update(Call)
                .where(Call.state.in_((RECORDED, UNTRAINABLE, STALE)), Call.recorded_at < self._clock() - older_than_s)
                .where(~corrected.exists())
                .values(state=EXPIRED, model_call={})
            )
            return int(done.rowcount)  # type: ignore[attr-defined]

    def forget(self, subject: str) -> list[Call]:
        """Erase the calls of a person and the feedback on these calls; returns the calls, without their content.

        The person's name is replaced by its digest, so that a repeated ``forget`` finds the calls. Raises UserError
        while a round collects some of the calls.
        """
        name = hashlib.sha256(subject.encode()).hexdigest()
        with self._transaction() as session:
            query = select(Call).where(Call.subject.in_((subject, name))).options(defer(Call.model_call))
            calls = list(session.scalars(query.with_for_update()))
            collecting = {call.batch for call in calls if call.state == COMMITTED and call.batch is not None}
            if collecting:
                raise UserError(f"round {min(collecting)} collects rows of this subject now: repeat this in a minute")
            for call in calls:
                call.subject, call.conversation, call.model_call, call.state = name, None, {}, FORGOTTEN
            about = select(FeedbackCall.feedback_id).join(Call).where(Call.subject == name)
            session.flush()
            session.execute(
                update(Feedback)
                .where(Feedback.feedback_id.in_(about))
                .values(comment=None, correction=None, tags={}, request={})
            )
            numbers = select(Call.number).where(Call.subject == name)
            session.execute(
                update(Preference)
                .where(or_(Preference.left_call.in_(numbers), Preference.right_call.in_(numbers)))
                .values(comment=None)
            )
            session.flush()
            session.expunge_all()
            return calls

    def compact(self) -> None:
        """Remove erased bytes from an SQLite database's files. PostgreSQL does so by its automatic VACUUM.

        Raises StorageError if another process still reads an old part of the files: the erased bytes are still there.
        """
        if self._engine.dialect.name != "sqlite":
            return
        with self._engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            connection.rollback()
            raw.execute("VACUUM").close()
            busy, *_ = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise StorageError(
                    "the write-ahead log of the database still holds erased text, because another process reads it: "
                    "repeat this in a minute"
                )
