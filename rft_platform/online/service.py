"""The online service of a project: gateway, pages and the threads that deploy releases and keep the database."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvicorn

from rft_platform.common.errors import UserError
from rft_platform.common.personal_data import Redaction
from rft_platform.common.user_code import load_object
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.serving.http_server import ConnectionLimits, server_config
from rft_platform.online.gateway.app import CommitRule, build_app
from rft_platform.online.gateway.limits import RateLimits
from rft_platform.online.gateway.proxy import TrafficApp
from rft_platform.online.gateway.release_routes import release_routes
from rft_platform.online.pages.routes import PageData, ProjectProgress, page_routes
from rft_platform.online.releases.controller import ReleaseController
from rft_platform.online.releases.exchange import VersionFollower
from rft_platform.online.releases.shared_place import shared_place
from rft_platform.online.releases.versions import release_commands
from rft_platform.online.traffic.alerts import TrafficWatch
from rft_platform.online.traffic.database import claim
from rft_platform.online.traffic.declared_metrics import DeclaredMetrics, Metric
from rft_platform.online.traffic.erasure import TrafficErasure
from rft_platform.online.traffic.history import first_call, traffic_history
from rft_platform.online.traffic.implicit_feedback import ImplicitRewards
from rft_platform.online.traffic.preferences import PreferenceStore
from rft_platform.online.traffic.project_traffic import home_id, traffic_database, traffic_store
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.selection import SamplingRateStrategy, Selection, SelectionStrategy
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.rounds.project.project import Project

LOG = logging.getLogger(__name__)

API_KEYS = "RFT_API_KEYS"  #: ``tenant:key,tenant:key``; if unset, the service needs no key and serves loopback only
_GRACE_S = 30
_BODY_S = 30.0  # a request's body must arrive within this time
_UPKEEP_S = 60.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def tenants_from_environment() -> dict[str, str]:
    """The tenant of each API key, from ``RFT_API_KEYS``. Raises UserError if the value is not a list of tenant:key."""
    tenants: dict[str, str] = {}
    for entry in filter(None, os.environ.get(API_KEYS, "").split(",")):
        tenant, colon, key = entry.strip().partition(":")
        if not (tenant and colon and len(key) >= 16):
            raise UserError(f"{API_KEYS}: expected tenant:key, tenant:key, ... with keys of at least 16 characters")
        tenants[key] = tenant
    return tenants


def serve(project: Project, what_is_next: Callable[[Project], Sequence[str]]) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UserError if the address is not loopback and no API keys are set.

    ``what_is_next`` describes what the project launches next, for the status page.
    """
    config, tenants = project.config, tenants_from_environment()
    host = config.explorer.listen_address
    if not tenants and host not in _LOOPBACK:
        raise UserError(f"explorer.listen_address {host}: set {API_KEYS}, or listen on 127.0.0.1 only")
    claim(traffic_database(project), home_id(project), f"{config.project}/{config.name}")
    service = _Service(project, tenants)
    connections = ConnectionLimits.within_open_files(_BODY_S, config.service.max_connections)
    server = uvicorn.Server(
        server_config(
            service.app(what_is_next), _GRACE_S, limits=connections,
            host=host, port=config.explorer.proxy_port, log_config=None, proxy_headers=False,
        )
    )  # fmt: skip
    stop = threading.Event()
    for name, run in service.threads().items():
        threading.Thread(target=run, args=(stop,), name=name, daemon=True).start()
    try:
        server.run()
    finally:
        stop.set()


class _Service:
    """The parts of the service, which share one database, one gateway and one redaction."""

    def __init__(self, project: Project, tenants: dict[str, str]) -> None:
        settings = project.config.service
        self._project, self._name = project, f"{project.config.project}/{project.config.name}"
        self._redaction = redaction_of(project)
        self._store = traffic_store(project, self._redaction)
        self._writer = TrafficWriter(self._store, settings.most_waiting)
        self._releases = release_commands(project)
        self._controller = ReleaseController(project, self._releases.store)
        self._rule = CommitRule(project.batches.repeat_times, settings.group_deadline_s)
        self._watch = TrafficWatch(project, traffic_database(project), self._store)
        place, wanted = shared_place(project), settings.implicit_feedback
        self._follower = VersionFollower(project, place) if place else None
        self._implicit = ImplicitRewards(project, traffic_database(project), self._store, wanted) if wanted else None
        self._limits = RateLimits(
            settings.requests_per_minute, settings.concurrent_requests, tokens_per_minute=settings.tokens_per_minute
        )
        self._most_bytes = round(settings.max_body_mib * (1 << 20))
        self._gateway = TrafficApp(
            self._controller.find_engine, self._writer, selection_of(project), _sampling_of(project),
            tenants=tenants, timeout_s=project.config.explorer.max_timeout,
            engine_needed=not any(self._store.counts().values()), model_name=self._name, limits=self._limits,
            most_choices=settings.most_choices, most_bytes=self._most_bytes,
        )  # fmt: skip

    def app(self, what_is_next: Callable[[Project], Sequence[str]]) -> Any:
        """Gateway, release routes and pages as one application."""
        progress = ProjectProgress(self._project, what_is_next, self._problems)
        database, tenant_of = traffic_database(self._project), self._gateway.tenant_of
        reader, reader_of_pages = TrafficReader(), TrafficReader()  # slow pages delay no report and no metric
        pages = PageData(
            project=self._name, releases=self._releases,
            preferences=PreferenceStore(database, redaction=self._redaction),
            traffic=self._store, writer=self._writer, reader=reader_of_pages, tenant_of=tenant_of,
            progress=progress, watch=self._watch,
            history=partial(traffic_history, database), first_call=partial(first_call, database),
        )  # fmt: skip
        return build_app(
            self._gateway, self._writer, reader, self._rule, health_fields=lambda: {"project": self._name},
            routes=[release_routes(self._releases, self._writer, reader, tenant_of)], pages=page_routes(pages),
            further_metrics=lambda: self._metrics() | {"problems": len(progress.problems())},
            limits=self._limits, metrics=metrics_of(self._project), most_bytes=self._most_bytes,
        )  # fmt: skip

    def threads(self) -> dict[str, Callable[[threading.Event], None]]:
        """The loops that run beside the server, by name; each ends when the event is set."""
        found: dict[str, Callable[[threading.Event], None] | None] = {
            "implicit": self._implicit.run if self._implicit else None,
            "releases": lambda stop: self._controller.run(self._gateway.router, stop),
            "upkeep": lambda stop: run_upkeep(self._project, self._store, self._rule, stop),
            "follow": self._follower.run if self._follower else None,
            "watch": self._watch.run,
        }
        return {name: run for name, run in found.items() if run is not None}

    def _problems(self) -> list[str | None]:
        return [self._controller.engine_starts.problem, self._follower.problem if self._follower else None]

    def _metrics(self) -> dict[str, float]:
        implicit = self._implicit.metrics() if self._implicit else {}
        return {**self._watch.metrics(), "calls_redacted": self._redaction.calls, **implicit}


def _sampling_of(project: Project) -> SamplingParams:
    """The sampling parameters of requests that set none."""
    model = project.config.model
    return SamplingParams(
        max_tokens=model.response_limit, temperature=model.temperature, top_p=model.top_p, top_k=model.top_k
    )


def selection_of(project: Project) -> Selection:
    """Select calls by the configured strategies first, then by the sampling rate."""
    own: Sequence[SelectionStrategy] = [
        load_object(reference, "service.selection")() for reference in project.config.service.selection
    ]
    return Selection([*own, SamplingRateStrategy(project.config.service.record_rate, priority=-1)])


def metrics_of(project: Project) -> DeclaredMetrics:
    """The metrics that feedback may have."""
    return DeclaredMetrics.of_service(Metric(**each.model_dump()) for each in project.config.service.metrics)


def redaction_of(project: Project) -> Redaction:
    """The configured redaction of texts. Raises UserError if its function cannot be imported."""
    reference = project.config.service.redaction
    return Redaction(None if reference is None else load_object(reference, "service.redaction"))


def run_upkeep(project: Project, store: TrafficStore, rule: CommitRule, stop: threading.Event) -> None:
    """Until ``stop`` is set: erase old calls that are not trained on, and commit if the configuration says so."""
    service, erasure = project.config.service, TrafficErasure(traffic_database(project))
    while not stop.wait(service.commit_interval_s or _UPKEEP_S):
        steps: list[Callable[[], object]] = [lambda: erasure.expire(service.retention_days * 86_400)]
        if service.commit_interval_s is not None:
            steps.append(lambda: store.commit(group_size=rule.group_size, group_deadline_s=rule.group_deadline_s))
        for step in steps:
            try:
                step()
            except Exception as error:
                LOG.warning("upkeep of the traffic database failed and will be retried: %s", error)
