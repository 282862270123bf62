"""The online service of a project: gateway, pages and the threads that deploy releases and keep the database."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

import uvicorn

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.serving.http_server import ConnectionLimits, server_config
from rft_platform.online.gateway.app import CommitRule, build_app
from rft_platform.online.gateway.limits import RateLimits
from rft_platform.online.gateway.proxy import TrafficApp
from rft_platform.online.gateway.release_routes import release_routes
from rft_platform.online.pages.routes import PageData, ProjectProgress, TrafficReader, page_routes
from rft_platform.online.releases.controller import ReleaseController
from rft_platform.online.releases.exchange import VersionFollower
from rft_platform.online.releases.shared_place import shared_place
from rft_platform.online.releases.versions import release_commands
from rft_platform.online.traffic.alerts import TrafficWatch
from rft_platform.online.traffic.database import claim
from rft_platform.online.traffic.declared_metrics import DeclaredMetrics, Metric
from rft_platform.online.traffic.erasure import TrafficErasure
from rft_platform.online.traffic.history import traffic_history
from rft_platform.online.traffic.implicit_feedback import ImplicitRewards
from rft_platform.online.traffic.personal_data import Redaction
from rft_platform.online.traffic.preferences import PreferenceStore
from rft_platform.online.traffic.project_traffic import home_id, traffic_database, traffic_store
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


def serve(project: Project, what_is_next: Callable[[Project], str]) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises UserError if the address is not loopback and no API keys are set.

    ``what_is_next`` describes what the project launches next, for the status page.
    """
    config, tenants = project.config, tenants_from_environment()
    host = config.explorer.listen_address
    if not tenants and host not in _LOOPBACK:
        raise UserError(f"explorer.listen_address {host}: set {API_KEYS}, or listen on 127.0.0.1 only")
    claim(traffic_database(project), home_id(project), f"{config.project}/{config.name}")
    redaction = redaction_of(project)
    store = traffic_store(project, redaction)
    writer = TrafficWriter(store, config.service.most_waiting)
    sampling = SamplingParams(
        max_tokens=config.model.response_limit,
        temperature=config.model.temperature,
        top_p=config.model.top_p,
        top_k=config.model.top_k,
    )
    releases = release_commands(project)
    controller = ReleaseController(project, releases.store)
    limits = RateLimits(
        config.service.requests_per_minute,
        config.service.concurrent_requests,
        tokens_per_minute=config.service.tokens_per_minute,
    )
    most_bytes = round(config.service.max_body_mib * (1 << 20))
    gateway = TrafficApp(
        controller.find_engine, writer, selection_of(project), sampling,
        tenants=tenants, timeout_s=config.explorer.max_timeout, engine_needed=not any(store.counts().values()),
        model_name=f"{config.project}/{config.name}", limits=limits, most_choices=config.service.most_choices,
        most_bytes=most_bytes,
    )  # fmt: skip
    rule = CommitRule(project.batches.repeat_times, config.service.group_deadline_s)
    wanted = config.service.implicit_feedback
    implicit = None if wanted is None else ImplicitRewards(project, traffic_database(project), store, wanted)
    watch = TrafficWatch(project, traffic_database(project), store)
    place = shared_place(project)
    follower = None if place is None else VersionFollower(project, place)
    progress = ProjectProgress(
        project, what_is_next, lambda: [controller.engine_starts.problem, follower.problem if follower else None]
    )
    pages = PageData(
        f"{config.project}/{config.name}", releases,
        PreferenceStore(traffic_database(project), redaction=redaction), store, writer, TrafficReader(),
        gateway.tenant_of, progress, watch, partial(traffic_history, traffic_database(project)),
    )  # fmt: skip
    app = build_app(
        gateway, writer, rule, lambda: {"project": f"{config.project}/{config.name}"},
        [release_routes(releases, writer, gateway.tenant_of)], page_routes(pages),
        lambda: {
            **watch.metrics(), "problems": len(progress.problems()), "calls_redacted": redaction.calls,
            **(implicit.metrics() if implicit else {}),
        },
        limits, metrics_of(project), most_bytes,
    )  # fmt: skip
    stop = threading.Event()
    threads: dict[str, Callable[[threading.Event], None] | None] = {
        "implicit": implicit.run if implicit else None,
        "releases": lambda stop: controller.run(gateway.router, stop),
        "upkeep": lambda stop: keep(project, store, rule, stop),
        "follow": follower.run if follower else None,
        "watch": watch.run,
    }
    for name, run in threads.items():
        if run is not None:
            threading.Thread(target=run, args=(stop,), name=name, daemon=True).start()
    server = uvicorn.Server(
        server_config(
            app, _GRACE_S, limits=ConnectionLimits.within_open_files(_BODY_S, config.service.max_connections),
            host=host, port=config.explorer.proxy_port, log_config=None, proxy_headers=False,
        )
    )  # fmt: skip
    try:
        server.run()
    finally:
        stop.set()


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


def keep(project: Project, store: TrafficStore, rule: CommitRule, stop: threading.Event) -> None:
    """Until ``stop`` is set: erase old calls without feedback, and commit if the configuration says so."""
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
