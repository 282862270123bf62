"""Figures of the newest production traffic: actions with their rewards, and delays.

The delays are from a call to its reward, and from a reward to an answer by weights that were trained on it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from rft_platform.serving.database import FIRST_IMPORTED, Call, readings
from rft_platform.serving.rules.alerts import ActionFigures, TrafficFigures

_MOST = 100_000  # calls that are counted, so that the figures of busy traffic are computed quickly
_NEWEST = 10_000  # calls from which percentiles are computed


def traffic_figures(engine: Engine, since: float, versions: Mapping[int, int]) -> TrafficFigures:
    """Figures of the newest calls (at most ``_MOST``) recorded after ``since``, in seconds since the epoch.

    The index ``calls_recent`` has all columns that are read here. ``versions`` maps a round to the policy version that
    it trained.
    """
    with readings(engine)() as session:
        newest = select(Call.recorded_at).order_by(Call.recorded_at.desc()).offset(_MOST).limit(1)
        recent = Call.recorded_at >= max(since, session.scalar(newest) or since)
        counts = func.count(), func.count(Call.reward), func.avg(Call.reward), func.count(Call.labelled_at)
        rows = session.execute(select(Call.action, *counts).where(recent).group_by(Call.action)).all()
        actions = {
            action: ActionFigures(calls, rewarded, None if mean is None else float(mean))
            for action, calls, rewarded, mean, _ in rows
        }
        delays = session.execute(
            select(Call.labelled_at - Call.recorded_at)
            .where(recent, Call.labelled_at.is_not(None))
            .order_by(Call.recorded_at.desc())
            .limit(_NEWEST)
        ).scalars()
        return TrafficFigures(
            actions=actions,
            calls=sum(row[1] for row in rows),
            labelled=sum(row[4] for row in rows),
            label_delay_s=_percentiles([float(each) for each in delays if each is not None]),
            served_delay_s=_percentiles(_served_delays(session, recent, versions)),
        )


def _served_delays(session: Session, recent: Any, versions: Mapping[int, int]) -> list[float]:
    """Seconds from the reward of a consumed call until the first answer by weights that were trained on it."""
    query = select(Call.batch, Call.labelled_at).where(recent, Call.labelled_at.is_not(None))
    consumed = [
        (batch, labelled_at)
        for batch, labelled_at in session.execute(query.order_by(Call.recorded_at.desc()).limit(_NEWEST))
        if batch is not None and batch in versions and labelled_at is not None
    ]
    served = {
        batch: session.scalar(
            select(func.min(Call.recorded_at)).where(
                recent, Call.policy_version >= versions[batch], Call.policy_version <= FIRST_IMPORTED
            )
        )
        for batch in {batch for batch, _ in consumed}
    }
    found = [(served[batch], labelled_at) for batch, labelled_at in consumed]
    return [max(0.0, at - labelled_at) for at, labelled_at in found if at is not None]


def _percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Median and 95th percentile; None without a value."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[(len(ordered) - 1) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
