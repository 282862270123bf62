"""Alerts on production traffic: figures of the newest traffic compared with configured limits."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from rft_platform.config.schema.service import Alerts
from rft_platform.observability.alert_channels import deliver
from rft_platform.online.traffic.database import FIRST_IMPORTED, Call, readings
from rft_platform.online.traffic.incoming import QUESTION, TOOL_INVALID
from rft_platform.online.traffic.project_traffic import round_rule
from rft_platform.online.traffic.store import ALERT, ALERT_ENDED, TrafficStore
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import published
from rft_platform.rounds.releases.training_start import AFTER_REFUSALS, newest_refused

LOG = logging.getLogger(__name__)
_MOST = 100_000  # calls that are counted, so that the figures of busy traffic are computed quickly
_NEWEST = 10_000  # calls from which percentiles are computed
_INTERVAL_S = 20.0
_ROUNDS = 100  # newest rounds whose versions are looked up


@dataclass(frozen=True, slots=True)
class CallFigures:
    """The calls of one action, or by one policy version."""

    calls: int
    rewarded: int  # calls with a reward
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """Figures of the calls that were recorded in a time window. None: there was nothing to measure."""

    actions: Mapping[str, CallFigures] = field(default_factory=dict)
    by_version: Mapping[int | None, CallFigures] = field(default_factory=dict)  # None: the base model
    calls: int = 0
    labelled: int = 0
    label_delay_s: tuple[float, float] | None = None  # from the answer to its last reward: median and 95th percentile
    served_delay_s: tuple[float, float] | None = None  # from a reward until weights trained on it answer

    @property
    def label_rate(self) -> float | None:
        """Share of the calls with a reward."""
        return self.labelled / self.calls if self.calls else None

    def rate(self, action: str) -> float | None:
        """Share of the calls with this action."""
        return self.actions[action].calls / self.calls if action in self.actions else 0.0 if self.calls else None

    def reward(self, action: str) -> float | None:
        """Mean reward of this action."""
        return self.actions[action].mean_reward if action in self.actions else None


def alerts_of(figures: TrafficFigures, limits: Alerts, refused_in_a_row: int = 0) -> dict[str, str]:
    """The exceeded limits by name, each with a message; while there are too few calls, only that of refused versions.

    ``refused_in_a_row``: newest versions that the gate of the evaluation refused, or that were withdrawn later.
    """
    refusals = _above("versions refused in a row", refused_in_a_row, limits.refused_in_a_row)
    found = {"refused_in_a_row": f"{refusals}; {AFTER_REFUSALS}" if refusals else ""}
    if figures.calls >= limits.least_calls:
        found |= dict(_exceeded(figures, limits))
    return {name: text for name, text in found.items() if text}


def _exceeded(figures: TrafficFigures, limits: Alerts) -> Iterator[tuple[str, str]]:
    invalid, reward = figures.rate(TOOL_INVALID), figures.reward(TOOL_INVALID)
    yield "invalid_rate", _above("invalid tool calls", invalid, limits.invalid_rate, percent=True)
    yield "invalid_reward", _above("mean reward of invalid tool calls", reward, limits.invalid_reward)
    questions = figures.rate(QUESTION)
    yield "question_rate", _above("answers that are questions", questions, limits.question_rate, percent=True)
    if figures.label_rate is not None and limits.label_rate is not None and figures.label_rate < limits.label_rate:
        yield "label_rate", f"calls with a reward: {figures.label_rate:.1%}, the limit is {limits.label_rate:.1%}"
    for name, found, limit in (
        ("label_delay_s", figures.label_delay_s, limits.label_delay_s),
        ("served_delay_s", figures.served_delay_s, limits.served_delay_s),
    ):
        what = "seconds to a reward (p95)" if name == "label_delay_s" else "seconds from a reward to new weights (p95)"
        yield name, _above(what, None if found is None else found[1], limit)


def _above(what: str, value: float | None, limit: float | None, *, percent: bool = False) -> str:
    if value is None or limit is None or value <= limit:
        return ""
    shown = (f"{value:.1%}", f"{limit:.1%}") if percent else (f"{value:,.3g}", f"{limit:,.3g}")
    return f"{what}: {shown[0]}, the limit is {shown[1]}"


def traffic_figures(engine: Engine, since: float, versions: Mapping[int, int]) -> TrafficFigures:
    """Figures of the newest calls (at most ``_MOST``) recorded after ``since``, in seconds since the epoch.

    The index ``calls_recent`` has all columns that are read here. ``versions`` maps a round to the policy version that
    it trained.
    """
    with readings(engine)() as session:
        newest = select(Call.recorded_at).order_by(Call.recorded_at.desc()).offset(_MOST).limit(1)
        recent = Call.recorded_at >= max(since, session.scalar(newest) or since)
        counts = func.count(), func.count(Call.reward), func.avg(Call.reward), func.count(Call.labelled_at)
        action_rows, version_rows = (
            session.execute(select(column, *counts).where(recent).group_by(column)).all()
            for column in (Call.action, Call.policy_version)
        )
        actions, by_version = (
            {
                key: CallFigures(calls, rewarded, None if mean is None else float(mean))
                for key, calls, rewarded, mean, _ in rows
            }
            for rows in (action_rows, version_rows)
        )
        delays = session.execute(
            select(Call.labelled_at - Call.recorded_at)
            .where(recent, Call.labelled_at.is_not(None))
            .order_by(Call.recorded_at.desc())
            .limit(_NEWEST)
        ).scalars()
        return TrafficFigures(
            actions=actions,
            by_version=by_version,
            calls=sum(row[1] for row in action_rows),
            labelled=sum(row[4] for row in action_rows),
            label_delay_s=percentiles([float(each) for each in delays if each is not None]),
            served_delay_s=percentiles(_served_delays(session, recent, versions)),
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


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Median and 95th percentile; None without a value."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[(len(ordered) - 1) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Watch:
    """Figures of the traffic; the service computes them at intervals."""

    rows_above_share: int = 0  # committed rows above the share of their task, subject or tenant in the next round
    figures: TrafficFigures = field(default_factory=TrafficFigures)
    alerts: Mapping[str, str] = field(default_factory=dict)  # exceeded limits with their messages


class TrafficWatch:
    """Computes the figures of a project's traffic at intervals; any thread may read the newest ones."""

    def __init__(
        self, project: Project, database: Engine, store: TrafficStore, clock: Callable[[], float] = time.time
    ) -> None:
        self._project = project
        self._database = database
        self._store = store
        self._clock = clock
        self._newest = Watch()
        self._open: set[str] | None = None  # alerts that the database has as begun; None: not read yet
        self._limits = project.config.service.alerts

    def __call__(self) -> Watch:
        """The newest figures for the status page."""
        return self._newest

    def metrics(self) -> dict[str, float]:
        """The newest figures for ``/metrics``."""
        watch = self._newest
        return {
            "rows_above_share": watch.rows_above_share,
            "alerts": len(watch.alerts),
            **_metrics_of(watch.figures),
        }

    def update(self) -> None:
        """Compute the figures, and report limits that are exceeded now or no longer."""
        figures = traffic_figures(self._database, self._clock() - self._limits.window_s, self._versions())
        watch = Watch(
            rows_above_share=len(self._store.next_choice(round_rule(self._project)).above_share),
            figures=figures,
            alerts=alerts_of(figures, self._limits, len(newest_refused(self._project))),
        )
        self._newest = watch
        if self._open is None:  # alerts that an earlier process of the service has recorded
            self._open = set(self._store.open_alerts())
        for name in sorted(watch.alerts.keys() - self._open):
            LOG.warning("alert: %s (service.alerts.%s)", watch.alerts[name], name)
            self._store.log(ALERT, watch.alerts[name], limit=name)
            self._open.add(name)
            self._deliver(name, watch.alerts[name])
        for name in sorted(self._open - watch.alerts.keys()):
            LOG.info("the alert service.alerts.%s has ended", name)
            self._store.log(ALERT_ENDED, f"service.alerts.{name} is kept again", limit=name)
            self._open.remove(name)

    def _deliver(self, limit: str, message: str) -> None:
        name = f"{self._project.config.project}/{self._project.config.name}"
        alert = {"project": name, "limit": limit, "text": f"{name}: {message} (service.alerts.{limit})"}
        deliver(f"service.alerts.{limit}", alert)

    def run(self, stop: threading.Event) -> None:
        """Update the figures until ``stop`` is set; after an error the old figures stay."""
        while True:
            try:
                self.update()
            except Exception as error:
                LOG.warning("the figures of production traffic cannot be computed and will be retried: %s", error)
            if stop.wait(_INTERVAL_S):
                return

    def _versions(self) -> Mapping[int, int]:
        """The policy versions that the newest rounds have trained.

        A round that trained nothing is left out: it published the same version as the round before.
        """
        store = self._project.store
        policies = {number: published(store, number) for number in store.rounds()[-_ROUNDS - 1 :]}
        versions = [(number, policy.policy_version) for number, policy in policies.items() if policy is not None]
        return {number: version for (_, before), (number, version) in pairwise(versions) if version != before}


def _metrics_of(figures: TrafficFigures) -> dict[str, float]:
    """The figures that have a value, by name."""
    found: dict[str, float | None] = {"recent_calls": figures.calls, "recent_label_rate": figures.label_rate}
    for action, each in figures.actions.items():
        found[f"recent_calls_{action}"] = each.calls
        found[f"recent_reward_{action}"] = each.mean_reward
    for name, delay in (("label", figures.label_delay_s), ("served", figures.served_delay_s)):
        if delay is not None:
            found |= {f"recent_{name}_delay_p50_s": delay[0], f"recent_{name}_delay_p95_s": delay[1]}
    return {name: value for name, value in found.items() if value is not None}
