"""Erase texts and tokens of production traffic: of old calls without a reward, and of a person who asks for it."""

import hashlib
import hmac
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Engine, Select, and_, delete, or_, select, update
from sqlalchemy.orm import Session, defer, make_transient

from rft_platform.common.errors import StorageError, UserError
from rft_platform.online.traffic.database import (
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
from rft_platform.online.traffic.incoming import NewFeedback
from rft_platform.online.traffic.preferences import Preference

_ERASED = re.compile(r"forgotten-[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Person:
    """Whose data is erased. ``key`` makes the digests that replace names: without it, no name can be guessed."""

    subject: str
    key: bytes
    tenant: str | None = None  # None: of any tenant

    def erased(self, name: str) -> str:
        """The digest that replaces a name; a digest stays as it is."""
        if _ERASED.fullmatch(name):
            return name
        return f"forgotten-{hmac.new(self.key, name.encode(), hashlib.sha256).hexdigest()}"

    def calls_condition(self) -> ColumnElement[bool]:
        """The SQL condition that a call names the person, or did so before it was erased."""
        named = Call.subject.in_((self.subject, self.erased(self.subject)))
        return named if self.tenant is None else and_(named, Call.tenant == self.tenant)

    def feedback_ids(self) -> Select[str]:
        """The query of the ids of the feedback on the person's calls."""
        return select(FeedbackCall.feedback_id).join(Call).where(self.calls_condition()).distinct()

    def compared_condition(self) -> ColumnElement[bool]:
        """The SQL condition that a preference compares a call of the person."""
        numbers = select(Call.number).where(self.calls_condition())
        return or_(Preference.left_call.in_(numbers), Preference.right_call.in_(numbers))

    def rated_condition(self) -> ColumnElement[bool]:
        """The SQL condition that the person picked the answer of a preference."""
        rated = Preference.rater == self.subject
        if self.tenant is None:
            return rated
        return and_(rated, Preference.left_call.in_(select(Call.number).where(Call.tenant == self.tenant)))


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

    def forget(self, person: Person) -> list[Call]:
        """Erase the calls of a person, the feedback on these calls, and the person's comments on answers of others.

        Returns the calls, without their content.
        The subject is replaced by a keyed digest, so that a repeated ``forget`` finds the calls. Raises UserError while
        a round collects some of the calls, and if the person has no tenant and several tenants name the subject.
        """
        with self._transaction() as session:
            query = select(Call).where(person.calls_condition()).options(defer(Call.model_call))
            calls = list(session.scalars(query.with_for_update()))
            rated = (
                select(Call.tenant)
                .join(Preference, Preference.left_call == Call.number)
                .where(person.rated_condition())
            )
            _check_forgettable(person, calls, set(session.scalars(rated)))
            for call in calls:
                call.subject, call.conversation, call.model_call = person.erased(person.subject), None, {}
                call.state = FORGOTTEN
            session.flush()
            session.execute(
                update(Feedback)
                .where(Feedback.feedback_id.in_(person.feedback_ids()))
                .values(comment=None, correction=None, tags={}, request={})
            )
            concerned = or_(person.compared_condition(), person.rated_condition())
            session.execute(update(Preference).where(concerned).values(comment=None))
            session.flush()
            session.expunge_all()
            return calls

    def has_rated(self, person: Person) -> bool:
        """Whether the person picked the answer of a preference, until ``forget_names`` removes the rater."""
        with self._transaction() as session:
            return session.scalar(select(Preference.number).where(person.rated_condition()).limit(1)) is not None

    def forget_names(self, person: Person) -> None:
        """Replace the names of tasks, runs and feedback of the forgotten calls by keyed digests, and remove raters.

        Call it last: a ``forget`` that is repeated after a crash needs the names to find the traces of the runs.
        """
        with self._transaction() as session:
            for call in session.scalars(select(Call).where(person.calls_condition()).options(defer(Call.model_call))):
                call.task_id, call.run_id = (name and person.erased(name) for name in (call.task_id, call.run_id))
            session.flush()
            for name in list(session.scalars(person.feedback_ids())):
                _rename_feedback(session, name, person.erased(name))
            session.execute(
                update(Preference).where(or_(person.compared_condition(), person.rated_condition())).values(rater=None)
            )

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


def repeats_erased(session: Session, feedback: NewFeedback, unknown: Collection[str], calls: Collection[Call]) -> bool:
    """Whether a feedback names answers of a forgotten person and repeats an erased feedback.

    The service cannot compare the ids: one is a digest now, and the key of the digests is in the home that trains. So a
    feedback of the same value on the same answers counts as a repetition. ``calls``: those that it would label.
    """
    forgotten = select(Call.number).where(Call.state == FORGOTTEN, Call.msg_id.in_(unknown))
    if feedback.choice is not None:
        forgotten = forgotten.where(Call.choice == feedback.choice)
    if feedback.tenant:
        forgotten = forgotten.where(Call.tenant == feedback.tenant)
    gone = set(session.scalars(forgotten))
    about = FeedbackCall.feedback_id.in_(select(FeedbackCall.feedback_id).where(FeedbackCall.number.in_(gone)))
    same = (Feedback.metric == feedback.metric, Feedback.value.is_not_distinct_from(feedback.value))
    query = select(FeedbackCall.feedback_id, FeedbackCall.number).join(Feedback).where(about, *same)
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for feedback_id, number in session.execute(query) if gone else ():
        numbers[feedback_id].add(number)
    return gone | {call.number for call in calls} in numbers.values()


def _check_forgettable(person: Person, calls: Sequence[Call], rated: set[str]) -> None:
    """``rated``: the tenants of the answers that the person compared."""
    tenants = sorted({call.tenant for call in calls} | rated)
    if len(tenants) > 1:
        raise UserError(
            f"calls or preferences of the tenants {', '.join(map(repr, tenants))} name the subject {person.subject!r}, "
            "who may be several persons: name one tenant by --tenant"
        )
    collecting = {call.batch for call in calls if call.state == COMMITTED and call.batch is not None}
    if collecting:
        raise UserError(f"round {min(collecting)} collects rows of this subject now: repeat this in a minute")


def _rename_feedback(session: Session, name: str, new_name: str) -> None:
    """Give a feedback another id, also in the table that refers to it."""
    if name == new_name:
        return
    feedback = session.get_one(Feedback, name)
    session.expunge(feedback)
    make_transient(feedback)
    feedback.feedback_id = new_name
    session.add(feedback)
    session.flush()
    session.execute(update(FeedbackCall).where(FeedbackCall.feedback_id == name).values(feedback_id=new_name))
    session.execute(delete(Feedback).where(Feedback.feedback_id == name))
