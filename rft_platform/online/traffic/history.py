"""History of the production traffic for the status page: success, delays and versions, from the stored calls."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sqlalchemy import Engine, case, func, select
from sqlalchemy.orm import Session

from rft_platform.online.traffic.alerts import percentiles
from rft_platform.online.traffic.database import Call, readings
from rft_platform.online.traffic.declared_metrics import SUCCESS

_MOST = 500_000  # calls that are counted, so that the history of busy traffic is computed quickly
_DELAYS = 500  # newest rewards of an interval from which percentiles are computed
_LATENCIES = 50  # newest calls of an interval whose latency is read: it lies in the stored call with its texts


@dataclass(frozen=True, slots=True)
class Interval:
    """The calls that were recorded between ``start`` and ``end``. None: there was nothing to measure."""

    start: float  # seconds since the epoch
    end: float
    versions: dict[int | None, int] = field(default_factory=dict)  # calls by policy version; None: the base model
    rewarded: int = 0
    success: float | None = None  # share of the rewarded calls with a reward of ``SUCCESS`` or more
    mean_reward: float | None = None
    latency_s: tuple[float, float] | None = None  # median and 95th percentile
    label_delay_s: tuple[float, float] | None = None

    @property
    def calls(self) -> int:
        """Number of calls."""
        return sum(self.versions.values())


def first_call(engine: Engine) -> float | None:
    """When the first call was recorded, in seconds since the epoch."""
    with readings(engine)() as session:
        return session.scalar(select(func.min(Call.recorded_at)))


def traffic_history(engine: Engine, since: float, until: float, intervals: int) -> list[Interval]:
    """Equal intervals from ``since`` to ``until``, oldest first. Only the newest ``_MOST`` calls are counted."""
    with readings(engine)() as session:
        newest = select(Call.recorded_at).order_by(Call.recorded_at.desc()).offset(_MOST).limit(1)
        since = max(since, session.scalar(newest) or since)
        width = (until - since) / intervals
        edges = [since + width * index for index in range(intervals)] + [until]
        return [_interval(session, start, end) for start, end in pairwise(edges)]


def _interval(session: Session, start: float, end: float) -> Interval:
    within = (Call.recorded_at >= start, Call.recorded_at < end)
    succeeded = func.sum(case((Call.reward >= SUCCESS, 1), else_=0))
    query = select(Call.policy_version, func.count(), func.count(Call.reward), func.sum(Call.reward), succeeded)
    rows = session.execute(query.where(*within).group_by(Call.policy_version)).all()
    if not rows:
        return Interval(start, end)
    rewarded = sum(row[2] for row in rows)

    def newest(value: Any, limit: int, *conditions: Any) -> list[float]:
        query = select(value).where(*within, *conditions).order_by(Call.recorded_at.desc())
        return [float(each) for each in session.scalars(query.limit(limit)) if each is not None]

    return Interval(
        start,
        end,
        {version: calls for version, calls, *_ in rows},
        rewarded,
        sum(row[4] for row in rows) / rewarded if rewarded else None,
        sum(float(row[3]) for row in rows if row[3] is not None) / rewarded if rewarded else None,
        percentiles(newest(Call.model_call["duration_s"].as_float(), _LATENCIES)),
        percentiles(newest(Call.labelled_at - Call.recorded_at, _DELAYS, Call.labelled_at.is_not(None))),
    )
