"""Releases in the database: which version serves, canaries and A/B tests, and every decision with its reason.

At most one release runs at a time. Every method is one transaction; a decision and its event are written together.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal, TypeAlias

from sqlalchemy import Engine, Index, String, case, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from rft_platform.common.errors import UserError
from rft_platform.online.releases.routing import BASE, CANDIDATE, Arm, Split, Sticky, unit_of
from rft_platform.online.releases.rules import ReleaseRule, Successes
from rft_platform.online.traffic.database import (
    NUMBER,
    Base,
    Call,
    Event,
    Feedback,
    FeedbackCall,
    readings,
    transactions,
)
from rft_platform.online.traffic.declared_metrics import SUCCESS

Kind = Literal["canary", "ab"]
Status = Literal["running", "promoted", "rolled_back"]

_DECIDED = tuple(f"{kind}_{status}" for kind in ("canary", "ab") for status in ("promoted", "rolled_back"))
_ARMS: tuple[Arm, Arm] = (BASE, CANDIDATE)
_NAMES = {"canary": "canary", "ab": "A/B test"}

SATISFACTION = "satisfaction"  #: a metric of feedback; a user's rating counts for it as well


class ReleaseRow(Base):
    """A canary or an A/B test of two versions."""

    __tablename__ = "releases"
    __table_args__ = (Index("releases_status", "status"),)

    number: Mapped[int] = mapped_column(NUMBER, primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16))
    base_version: Mapped[int]
    candidate_version: Mapped[int]
    share: Mapped[float]
    sticky: Mapped[str] = mapped_column(String(16))
    rule: Mapped[dict[str, Any]]
    looks: Mapped[int] = mapped_column(default=0)
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    reason: Mapped[str]
    report: Mapped[dict[str, Any]]


class ServedVersion(Base):
    """A decision on which version serves; the newest one counts. ``version`` None: the newest released one."""

    __tablename__ = "served_versions"

    number: Mapped[int] = mapped_column(NUMBER, primary_key=True, autoincrement=True)
    at: Mapped[float]
    version: Mapped[int | None]
    reason: Mapped[str]


_RUNNING = select(ReleaseRow).where(ReleaseRow.status == "running")


@dataclass(frozen=True, slots=True)
class Release:
    """A canary or an A/B test. Versions are policy versions."""

    number: int
    kind: Kind
    status: Status
    base_version: int
    candidate_version: int
    share: float
    sticky: Sticky
    rule: ReleaseRule
    looks: int
    started_at: float
    ended_at: float | None
    reason: str
    report: Mapping[str, Any]

    @property
    def split(self) -> Split:
        """How the release splits the traffic."""
        return Split(self.share, self.sticky, self.number)

    def variant(self, arm: Arm) -> str:
        """The value of ``Call.variant`` for the calls of an arm."""
        return f"{self.number}/{arm}"

    def to_json(self) -> dict[str, Any]:
        """The release as plain JSON values."""
        return asdict(self)


#: Results of one arm: the mean of each unit (for example a user), by metric.
ArmOutcomes: TypeAlias = dict[str, list[float]]


class ReleaseStore:
    """Releases and served versions, in the database of the traffic."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._transaction, self._reading = transactions(engine), readings(engine)
        self._clock = clock

    def served(self) -> int | None:
        """The version that was chosen to serve; None: the newest released version serves."""
        with self._reading() as session:
            newest = session.scalar(select(ServedVersion).order_by(ServedVersion.number.desc()).limit(1))
            return None if newest is None else newest.version

    def verdicts(self) -> dict[int, str | None]:
        """The newest decision on each version: what withdrew it, or None if it was chosen to serve.

        A canary or an A/B test withdraws its candidate if the base version serves in the end; a roll-back withdraws the
        version that it replaces.
        """
        found: dict[int, str | None] = {}
        with self._reading() as session:
            releases = {row.number: row for row in session.scalars(select(ReleaseRow))}
            kinds = ("promoted", "rolled_back", *_DECIDED)
            for event in session.scalars(select(Event).where(Event.kind.in_(kinds)).order_by(Event.number)):
                release = releases.get(event.details.get("release", 0))
                if release is not None:
                    found[release.candidate_version] = f"{_NAMES[release.kind]} {release.number}"
                if (replaced := event.details.get("replaced")) is not None:
                    found[replaced] = "a roll-back"
                if (version := event.details.get("version")) is not None:
                    found[version] = None
        return found

    def serve(self, version: int | None, kind: str, reason: str, **details: Any) -> None:
        """Choose the version that serves; None: always the newest released one. UserError while a release runs.

        ``details`` are stored with the event.
        """
        with self._transaction() as session:
            running = self._running(session)
            if running is not None:
                raise UserError(
                    f"{running.kind} {running.number} of version {running.candidate_version} runs: "
                    "promote it or roll it back first"
                )
            self._serve(session, version, kind, reason, **details)

    def start(
        self, kind: Kind, base: int, candidate: int, share: float, sticky: Sticky, rule: ReleaseRule, reason: str
    ) -> Release:
        """Start a release. Raises UserError if one runs already, or if the share or a version is not valid."""
        if base == candidate:
            raise UserError(f"version {candidate} serves already: name another version as the candidate")
        if not 0 < share < 1:
            raise UserError(f"share {share:g}: expected a number above 0 and below 1")
        now = self._clock()
        with self._transaction() as session:
            running = self._running(session)
            if running is not None:
                raise UserError(
                    f"{running.kind} {running.number} is running, and only one release can run at a time: end it first"
                )
            row = ReleaseRow(
                kind=kind, status="running", base_version=base, candidate_version=candidate, share=share,
                sticky=sticky, rule=asdict(rule), looks=0, started_at=now, reason=reason, report={},
            )  # fmt: skip
            session.add(row)
            session.flush()
            details = {"release": row.number, "base": base, "candidate": candidate, "share": share, "sticky": sticky}
            session.add(Event(at=now, kind=f"{kind}_started", reason=reason, details=details))
            return _release(row)

    def running(self) -> Release | None:
        """The running canary or A/B test; None if none runs."""
        with self._reading() as session:
            row = session.scalar(_RUNNING)
            return None if row is None else _release(row)

    def find(self, number: int) -> Release | None:
        """A release by its number."""
        with self._reading() as session:
            row = session.get(ReleaseRow, number)
            return None if row is None else _release(row)

    def was_candidate(self, version: int) -> bool:
        """Whether a release has tested this version."""
        with self._reading() as session:
            query = select(func.count()).where(ReleaseRow.candidate_version == version)
            return bool(session.scalar(query))

    def newest(self, most: int = 20) -> list[Release]:
        """The newest releases, newest first."""
        with self._reading() as session:
            rows = session.scalars(select(ReleaseRow).order_by(ReleaseRow.number.desc()).limit(most))
            return [_release(row) for row in rows]

    def look(self, number: int, reason: str, report: Mapping[str, Any]) -> None:
        """Record that a release was evaluated without a decision."""
        with self._transaction() as session:
            row = session.get_one(ReleaseRow, number)
            row.looks, row.reason, row.report = row.looks + 1, reason, dict(report)
            session.add(Event(at=self._clock(), kind=f"{row.kind}_looked", reason=reason, details={"release": number}))

    def finish(
        self, number: int, status: Status, serve: int, reason: str, report: Mapping[str, Any], **details: Any
    ) -> bool:
        """End a release; version ``serve`` serves from now on. False, without a change, if the release has ended.

        ``details`` are stored with the event.
        """
        now = self._clock()
        with self._transaction() as session:
            row = session.get(ReleaseRow, number, with_for_update=True)
            if row is None or row.status != "running":
                return False
            row.status, row.ended_at, row.reason, row.report = status, now, reason, dict(report)
            self._serve(session, serve, f"{row.kind}_{status}", reason, release=number, **details)
            return True

    def successes(self, release: Release) -> dict[Arm, Successes]:
        """The labelled runs of both arms since the release began. A run has the reward of its last rated call."""
        with self._reading() as session:
            return {arm: self._successes(session, release.variant(arm)) for arm in _ARMS}

    @staticmethod
    def _successes(session: Session, variant: str) -> Successes:
        query = (
            select(Call.tenant, Call.msg_id, Call.task_id, Call.run_id, Call.choice, Call.reward)
            .where(Call.variant == variant, Call.reward.is_not(None))
            .order_by(Call.number)
        )
        rewards = {_run_of(row): row.reward for row in session.execute(query)}
        return Successes(sum(reward >= SUCCESS for reward in rewards.values()), len(rewards))

    def outcomes(self, release: Release) -> dict[Arm, ArmOutcomes]:
        """The traffic of both arms since the release began. It reads every call, so a canary is decided without it."""
        with self._reading() as session:
            return {arm: self._outcomes(session, release, release.variant(arm)) for arm in _ARMS}

    def _outcomes(self, session: Session, release: Release, variant: str) -> ArmOutcomes:
        rating = Feedback.request["user_feedback"]["rating"].as_float()
        satisfaction = case((Feedback.metric == SATISFACTION, Feedback.value), else_=rating)
        query = (
            select(
                Call.number, Call.tenant, Call.msg_id, Call.subject, Call.conversation, Call.task_id, Call.run_id,
                Call.choice, Call.reward,
                Call.model_call["duration_s"].as_float().label("latency_s"),
                func.avg(satisfaction).label(SATISFACTION),
            )
            .outerjoin(FeedbackCall, FeedbackCall.number == Call.number)
            .outerjoin(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
            .where(Call.variant == variant)
            .group_by(Call.number)
            .order_by(Call.number)
        )  # fmt: skip
        rated: dict[str, tuple[str, float]] = {}  # unit and reward of the last rated call of each run
        units: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in session.execute(query):
            names = {name: getattr(row, name) for name in ("subject", "conversation", "task_id", "run_id")}
            unit = f"{row.tenant}/{unit_of(names, release.sticky, row.msg_id)}"
            if row.latency_s is not None:
                units["latency_s"][unit].append(row.latency_s)
            if row.satisfaction is not None:
                units[SATISFACTION][unit].append(row.satisfaction)
            if row.reward is not None:
                rated[_run_of(row)] = unit, row.reward
        for unit, reward in rated.values():
            units["accuracy"][unit].append(float(reward >= SUCCESS))
        return {metric: [fmean(values) for values in by_unit.values()] for metric, by_unit in units.items()}

    def _running(self, session: Session) -> ReleaseRow | None:
        return session.scalar(_RUNNING.with_for_update())

    def _serve(self, session: Session, version: int | None, kind: str, reason: str, **details: Any) -> None:
        now = self._clock()
        session.add(ServedVersion(at=now, version=version, reason=reason))
        session.add(Event(at=now, kind=kind, reason=reason, details={"version": version, **details}))


def _run_of(row: Any) -> str:
    """The run of a call, or the call itself if it belongs to no run; each choice of an answer is a separate run."""
    run = f"{row.tenant}/{row.task_id}/{row.run_id}" if row.run_id is not None else row.msg_id
    return f"{row.choice}:{run}"


def _release(row: ReleaseRow) -> Release:
    values = {name: getattr(row, name) for name in Release.__dataclass_fields__}
    return Release(**{**values, "rule": ReleaseRule(**row.rule), "report": dict(row.report)})
