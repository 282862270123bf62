"""The life of production traffic in the database: recorded -> labelled -> committed -> consumed.

Every method is one transaction: when a method returns, its change is on disk, and a killed process leaves no partial
change. ``settle`` assigns rows to a round before they are exported, so a repeated export writes the same rows.
"""

import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session, defer

from rft_platform.common.errors import UserError
from rft_platform.common.personal_data import Redaction
from rft_platform.config.schema.reward_formula import PLAIN, RewardFormula
from rft_platform.online.traffic.database import (
    COMMITTED,
    CONSUMED,
    FORGOTTEN,
    LABELLED,
    RECORDED,
    STALE,
    STATES,
    UNTRAINABLE,
    Batch,
    Call,
    Event,
    Feedback,
    FeedbackCall,
    readings,
    transactions,
)
from rft_platform.online.traffic.declared_metrics import REWARD
from rft_platform.online.traffic.erasure import repeats_erased
from rft_platform.online.traffic.incoming import (
    NewCall,
    NewFeedback,
    redacted_feedback,
    row_of_call,
    row_of_feedback,
)
from rft_platform.online.traffic.labelling import rewards, trains
from rft_platform.online.traffic.round_rows import ChosenRows, CommittedRow, RoundRule, choose_rows

LOG = logging.getLogger(__name__)

ALERT, ALERT_ENDED = "alert", "alert_ended"  #: kinds of events; their detail ``limit`` names the exceeded limit
RESUMED = "training_resumed"  #: kind of the event by which a user ends the pause of the alerts that are open then
MOST_IDS = 10_000  #: messages that one feedback may name
_MANY_STALE = 0.25  # share of the committed rows that are stale, from which a warning is shown
NO_LIMITS = RoundRule()  #: a round takes all committed rows

_NUMBERS = 10_000  # row numbers in one statement


class ReusedFeedbackIdError(UserError):
    """Another feedback has the id of this one."""


@dataclass(frozen=True, slots=True)
class FeedbackResult:
    """The effect of a feedback, in numbers of message ids."""

    matched: int = 0  # ids that the feedback labelled, or whose reward it replaced
    duplicate: int = 0  # ids that had this feedback, or this reward, already
    late: int = 0  # ids whose rows were committed or erased by age before; the feedback is stored but labels no row
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The effect of a commit: numbers of committed rows, and of tasks that are held back."""

    committed: int = 0
    pending_groups: int = 0


def open_alerts(events: Iterable[tuple[str, str | None, str]], *, pausing: bool) -> dict[str, str]:
    """The messages of alerts that have begun and not ended, by the name of their limit.

    ``events`` are (kind, limit, message), oldest first. ``pausing``: only alerts after which no user has resumed the
    training.
    """
    found: dict[str, str] = {}
    for kind, limit, message in events:
        if kind == ALERT and limit is not None:
            found[limit] = message
        elif kind == ALERT_ENDED and limit is not None:
            found.pop(limit, None)
        elif kind == RESUMED and pausing:
            found.clear()
    return found


def many_stale(counts: Mapping[str, int]) -> str | None:
    """What to change if many rows became stale before a training took them; ``counts``: rows by state."""
    stale = counts[STALE]
    committed = stale + counts[COMMITTED] + counts[CONSUMED]
    if stale == 0 or stale < _MANY_STALE * committed:
        return None
    return (
        f"{stale:,} of {committed:,} committed rows have become stale so far, before a training could take them: raise "
        "buffer.train_batch_size or synchronizer.max_staleness, or lower service.record_rate"
    )


class TrafficStore:
    """Production traffic and its feedback, in one database that several processes may share."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.time,
        redaction: Redaction | None = None,
        train_on: RewardFormula = PLAIN,
    ) -> None:
        """Texts pass through ``redaction`` before they are stored; ``train_on`` makes rewards of metrics."""
        self._engine = engine
        self._transaction, self._reading = transactions(engine), readings(engine)
        self._clock = clock
        self._redaction = redaction or Redaction()
        self._train_on = train_on

    # --- recorded

    def prepare(self, call: NewCall) -> dict[str, Any]:
        """The row of an answered call, with redacted texts. Raises UserCodeError if the redaction fails."""
        return row_of_call(call, self._redaction)

    def insert(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Store prepared rows and return how many are new; a call that is stored already is not changed."""
        if not rows:
            return 0
        with self._engine.begin() as connection:  # many rows of one statement, which is compiled once
            return int(connection.execute(self._insert_new(Call), rows).rowcount)

    def record(self, calls: Iterable[NewCall]) -> int:
        """Prepare and store answered calls."""
        return self.insert([self.prepare(call) for call in calls])

    # --- labelled

    def give_feedback(self, feedback: NewFeedback, *further: NewFeedback) -> FeedbackResult:
        """Store a feedback and label its calls with the reward; a repeated feedback changes nothing.

        The calls of one feedback become one run, unless they belong to a run already. A later reward replaces an
        earlier one until the row is committed; both feedbacks stay stored. A feedback without a known message id is
        not stored. Raises ReusedFeedbackIdError if another feedback has its id, UserError if it trains an answer with
        several choices without naming one of them.

        ``further`` are the same report's values of other metrics: all of the report is stored or, after an error,
        nothing, so that the corrected report may have the same id. The result is that of the first feedback.
        """
        now = self._clock()
        parts = [redacted_feedback(each, self._redaction) for each in (feedback, *further)]
        with self._transaction() as session:
            results = [self._give(session, each, now) for each in parts]
        return results[0]

    def _give(self, session: Session, feedback: NewFeedback, now: float) -> FeedbackResult:
        """Store one redacted feedback and label its calls."""
        calls = self._calls_of(session, feedback)
        known = {call.msg_id for call in calls}
        unknown = tuple(each for each in dict.fromkeys(feedback.msg_ids) if each not in known)
        if not calls:
            return FeedbackResult(unknown=unknown)
        if unknown and repeats_erased(session, feedback, unknown, calls):
            return FeedbackResult(duplicate=len(known), unknown=unknown)
        row = row_of_feedback(feedback, now)
        if not session.connection().execute(self._insert_new(Feedback).values(row)).rowcount:
            _check_repeated(session.get_one(Feedback, row["feedback_id"]), row, feedback.feedback_id)
            return FeedbackResult(duplicate=len(known), unknown=unknown)
        _check_choices(calls, feedback, self._train_on)
        session.add_all(FeedbackCall(feedback_id=row["feedback_id"], number=call.number) for call in calls)
        open_states = (RECORDED,) if feedback.only_unlabelled else (RECORDED, LABELLED, UNTRAINABLE)
        open_calls = [call for call in calls if call.state in open_states]
        same = {call.msg_id for call in open_calls if self._train_on == PLAIN and _is_repeated(call, feedback)}
        if trains(feedback, self._train_on):
            run = feedback.run_id if feedback.run_id is not None else _run_of(known)
            task = feedback.task_id or _task_of(session, calls[0], feedback, run)
            found = rewards(session, open_calls, feedback, self._train_on)
            for call in (call for call in open_calls if call.number in found):
                call.state = UNTRAINABLE if call.state == UNTRAINABLE else LABELLED
                call.reward, call.labelled_at = found[call.number], now
                call.task_id = call.task_id or task
                call.run_id = call.run_id or run
        changed = {call.msg_id for call in open_calls}
        return FeedbackResult(
            matched=len(changed - same), duplicate=len(same), late=len(known - changed), unknown=unknown
        )

    # --- committed

    def commit(
        self,
        *,
        task_id: str | None = None,
        run_id: str | None = None,
        tenant: str = "",
        max_age_s: float | None = None,
        group_size: int = 1,
        group_deadline_s: float = 3600.0,
    ) -> CommitResult:
        """Commit labelled rows for training and return their number.

        ``task_id``, ``run_id`` and ``tenant`` restrict the commit; ``max_age_s`` leaves out rows that were labelled
        more than ``max_age_s`` seconds ago. Runs are committed whole. If ``group_size`` is above 1, tasks are committed
        whole as well: a task is committed if one of its runs matches ``run_id`` and ``max_age_s``. Each choice of an
        answer counts as a run. A task is held back until it has ``group_size`` labelled runs, or until its first label
        is ``group_deadline_s`` seconds old.
        """
        now = self._clock()
        with self._transaction() as session:
            query = select(Call).where(Call.state == LABELLED).options(defer(Call.model_call)).with_for_update()
            if task_id is not None:
                query = query.where(Call.task_id == task_id)
            if run_id is not None:
                tasks = select(Call.task_id).where(Call.state == LABELLED, Call.run_id == run_id)
                query = query.where(Call.task_id.in_(tasks) if group_size > 1 else Call.run_id == run_id)
            if tenant:
                query = query.where(Call.tenant == tenant)
            units: defaultdict[tuple[str | None, ...], list[Call]] = defaultdict(list)
            for call in session.scalars(query):
                run = None if group_size > 1 else call.run_id
                units[call.tenant, call.task_id or call.msg_id, run].append(call)
            committed = pending = 0
            for calls in units.values():
                if run_id is not None and all(call.run_id != run_id for call in calls):
                    continue
                if max_age_s is not None and all((call.labelled_at or now) < now - max_age_s for call in calls):
                    continue
                runs = {(call.run_id, call.choice) for call in calls}
                waited = now - min(call.labelled_at or now for call in calls)
                if len(runs) < group_size and waited < group_deadline_s:
                    pending += 1
                    continue
                for call in calls:
                    call.state, call.committed_at = COMMITTED, now
                committed += len(calls)
            return CommitResult(committed, pending)

    def next_choice(self, rule: RoundRule = NO_LIMITS) -> ChosenRows:
        """The rows that ``settle`` would assign to a round now, and why it would leave out the other committed rows."""
        with self._reading() as session:
            return choose_rows(self._committed(session), rule)

    # --- consumed

    def settle(self, batch: int, rule: RoundRule = NO_LIMITS) -> list[Call]:
        """Assign committed rows to a round, whole tasks in the order of their commit; return the round's rows.

        A task becomes stale if only weights older than ``rule.oldest_version`` sampled it: no round takes it. Tasks
        above a limit of ``rule`` stay committed.

        A repeated call returns the rows of the first call, so that an interrupted export is repeated exactly. If there
        is no row to assign, nothing is stored.
        """
        with self._transaction() as session:
            settled = session.get(Batch, batch)
            if settled is None or settled.rows == 0:
                found = choose_rows(self._committed(session, lock=True), rule)
                for numbers, values in ((found.stale, {"state": STALE}), (found.chosen, {"batch": batch})):
                    for start in range(0, len(numbers), _NUMBERS):
                        part = numbers[start : start + _NUMBERS]
                        session.execute(update(Call).where(Call.number.in_(part)).values(values))
                if not found.chosen:
                    return []
                if found.above_share:
                    LOG.info(
                        "round %d leaves out %d rows above the limits of a task, a subject or a tenant",
                        batch, len(found.above_share),
                    )  # fmt: skip
                session.merge(Batch(number=batch, rows=len(found.chosen), settled_at=self._clock(), consumed_at=None))
                session.flush()
            rows = list(session.scalars(select(Call).where(Call.batch == batch).order_by(Call.number)))
            session.expunge_all()
            return rows

    def is_consumed(self, batch: int) -> bool:
        """Whether the rows of a round are in Parquet already."""
        with self._reading() as session:
            settled = session.get(Batch, batch)
            return settled is not None and settled.rows > 0 and settled.consumed_at is not None

    def consume(self, batch: int) -> int:
        """Mark a round's rows as consumed and return the number of newly marked rows. Idempotent.

        Call it after the rows are written to Parquet.
        """
        now = self._clock()
        with self._transaction() as session:
            done = session.execute(
                update(Call).where(Call.batch == batch, Call.state == COMMITTED).values(state=CONSUMED, consumed_at=now)
            )
            session.execute(
                update(Batch).where(Batch.number == batch, Batch.consumed_at.is_(None)).values(consumed_at=now)
            )
            return int(done.rowcount)  # type: ignore[attr-defined]

    # --- everything else

    def calls(self, msg_ids: Sequence[str]) -> list[Call]:
        """The stored choices of these messages, in the order of their recording."""
        found: list[Call] = []
        with self._reading() as session:
            for start in range(0, len(msg_ids), _NUMBERS):
                part = msg_ids[start : start + _NUMBERS]
                found += session.scalars(select(Call).where(Call.msg_id.in_(part)).order_by(Call.number))
            session.expunge_all()
        return found

    def counts(self, tenant: str | None = None) -> dict[str, int]:
        """Number of rows in each state; ``tenant``: of this tenant only."""
        query = select(Call.state, func.count()).group_by(Call.state)
        with self._reading() as session:
            rows = session.execute(query if tenant is None else query.where(Call.tenant == tenant)).all()
            found: Counter[str] = Counter(dict(rows))
            return {state: found[state] for state in STATES}

    def log(self, kind: str, reason: str, **details: Any) -> None:
        """Append an event to the audit log."""
        with self._transaction() as session:
            session.add(Event(at=self._clock(), kind=kind, reason=reason, details=details))

    def events(self, newest: int = 100) -> list[Event]:
        """The newest events, newest first."""
        with self._reading() as session:
            found = list(session.scalars(select(Event).order_by(Event.number.desc()).limit(newest)))
            session.expunge_all()
            return found

    def open_alerts(self, *, pausing: bool = False) -> dict[str, str]:
        """The messages of the open alerts by the name of their limit; ``pausing``: of those that pause the training.

        The service writes the alerts. The process that trains, maybe on another host, reads them here.
        """
        kinds = (ALERT, ALERT_ENDED, RESUMED)
        with self._reading() as session:
            events = session.scalars(select(Event).where(Event.kind.in_(kinds)).order_by(Event.number))
            return open_alerts(
                ((each.kind, each.details.get("limit"), each.reason) for each in events), pausing=pausing
            )

    def resume_training(self, reason: str) -> list[str]:
        """End the pause of the alerts that are open now; returns their names. A later alert pauses again."""
        alerts = sorted(self.open_alerts(pausing=True))
        self.log(RESUMED, reason, limits=alerts)
        return alerts

    # --- helpers

    def _insert_new(self, table: type[Any]) -> Any:
        """An INSERT that does not change existing rows."""
        dialect = postgresql if self._engine.dialect.name == "postgresql" else sqlite
        return dialect.insert(table).on_conflict_do_nothing()

    def _calls_of(self, session: Session, feedback: NewFeedback) -> list[Call]:
        """The calls that a feedback is about, of its tenant only."""
        if len(feedback.msg_ids) > MOST_IDS:
            raise UserError(f"a feedback names {len(feedback.msg_ids):,} messages: expected at most {MOST_IDS:,}")
        query = select(Call).options(defer(Call.model_call)).order_by(Call.number).with_for_update()
        query = query.where(Call.state != FORGOTTEN)
        if feedback.msg_ids:
            query = query.where(Call.msg_id.in_(feedback.msg_ids))
            if feedback.choice is not None:
                query = query.where(Call.choice == feedback.choice)
        else:
            names_run = feedback.task_id is not None and feedback.run_id is not None
            if feedback.conversation is not None:
                query = query.where(Call.conversation == feedback.conversation)
            if names_run or feedback.conversation is None:
                query = query.where(Call.task_id == feedback.task_id, Call.run_id == feedback.run_id)
        return list(session.scalars(query if not feedback.tenant else query.where(Call.tenant == feedback.tenant)))

    def _committed(self, session: Session, *, lock: bool = False) -> Iterator[CommittedRow]:
        """The committed rows that belong to no round yet, in the order of their commit; ``lock`` locks the rows."""
        query = (
            select(Call.number, Call.tenant, Call.task_id, Call.msg_id, Call.subject, Call.policy_version)
            .where(Call.state == COMMITTED, Call.batch.is_(None))
            .order_by(Call.committed_at, Call.task_id, Call.number)
        )
        query = query.with_for_update() if lock else query
        for number, tenant, task_id, msg_id, subject, version in session.execute(query):
            yield CommittedRow(number, tenant, task_id or msg_id, msg_id, subject, version)


def _check_repeated(stored: Feedback, row: Mapping[str, Any], feedback_id: str) -> None:
    """Raise ReusedFeedbackIdError unless ``row`` repeats the stored feedback, or that one has been erased."""
    compared = ("metric", "value", "comment", "correction", "tags", "request")
    erased = bool(row["request"]) and not stored.request
    if not erased and any(getattr(stored, name) != row[name] for name in compared):
        raise ReusedFeedbackIdError(
            f"feedback_id {feedback_id!r}: another feedback has this id, so this one is not stored; give each feedback "
            "its own id, and send an id again only with the same body"
        )


def _check_choices(calls: Sequence[Call], feedback: NewFeedback, train_on: RewardFormula) -> None:
    """Raise UserError if a reward or correction is about an answer with several choices and does not name one."""
    if feedback.choice is not None or (feedback.correction is None and not trains(feedback, train_on)):
        return
    for msg_id, choices in Counter(call.msg_id for call in calls).items():
        if choices > 1:
            raise UserError(
                f"the answer {msg_id} has {choices} choices: rate each of them by its own feedback, with msg_ids "
                "and choice, which is the index of the choice"
            )


def _is_repeated(call: Call, feedback: NewFeedback) -> bool:
    """Whether the call already has the reward of ``feedback``, and ``feedback`` has nothing else."""
    if feedback.metric != REWARD or feedback.comment or feedback.correction:
        return False
    return call.labelled_at is not None and call.reward == feedback.value


def _task_of(session: Session, call: Call, feedback: NewFeedback, run: str) -> str:
    """The task of a run whose task nobody named: the run, but each further prompt of a text completion is a task."""
    if feedback.choice is None:
        return run
    query = select(Call.choice, Call.model_call["prompt_ids"]).where(Call.msg_id == call.msg_id).order_by(Call.choice)
    prompts: dict[int, Any] = dict(session.execute(query).all())
    first = next(choice for choice, prompt in prompts.items() if prompt == prompts[call.choice])
    return _run_of([run, f"prompt of choice {first}"]) if first > min(prompts) else run


def _run_of(msg_ids: Iterable[str]) -> str:
    """The run id for a feedback that has none: the same messages give the same id."""
    return hashlib.sha256("\n".join(sorted(msg_ids)).encode()).hexdigest()[:16]
