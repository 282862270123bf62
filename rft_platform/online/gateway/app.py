"""The online service's HTTP API: chat, feedback, commit, health and metrics. Every answer is JSON, except the metrics.

``/v1/*`` is the policy's OpenAI API (``proxy``). The service answers a feedback or a commit only after the database
has written it to disk.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from rft_platform.common import json_codec
from rft_platform.common.errors import StorageError
from rft_platform.inference.serving.api_guard import check_caller, contained, refuse_stranger, send_error
from rft_platform.inference.serving.request_body import parsing_route, read_body, replayed
from rft_platform.online.gateway.limits import RateLimits
from rft_platform.online.gateway.proxy import TrafficApp, caller_of, refused_by_limit
from rft_platform.online.gateway.release_routes import ADMIN
from rft_platform.online.gateway.request_bodies import CommitRequest, FeedbackRequest
from rft_platform.online.traffic.database import DatabaseUnavailableError
from rft_platform.online.traffic.declared_metrics import DeclaredMetrics, MetricError, further_id
from rft_platform.online.traffic.incoming import NewFeedback
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.store import ReusedFeedbackIdError
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.openai_api import errors
from rft_platform.openai_api.errors import ApiError
from rft_platform.web_guard.checks import configured_hosts, headers_of

_METRICS_S = 2.0  # a scrape waits this long for the database
_FEEDBACK = "/feedback"  # the only path below which a body may be large, beside the OpenAI API
_MOST_BYTES = json_codec.LARGE_BYTES  # of the bodies of other paths
_MOST_VALUES = 20_000  # in the JSON of a feedback or commit; checks in Python look at each
_PUBLIC = ("/health",)  # paths that need no key


@dataclass(frozen=True, slots=True)
class CommitRule:
    """When labelled rows are committed."""

    group_size: int = 1  # runs of a task that are committed together
    group_deadline_s: float = 3600.0  # a smaller group is committed when its first label is this old


def build_app(
    gateway: TrafficApp,
    writer: TrafficWriter,
    reader: TrafficReader,
    rule: CommitRule,
    *,
    health_fields: Callable[[], Mapping[str, Any]] = dict,
    routes: Sequence[APIRouter] = (),
    pages: APIRouter | None = None,
    further_metrics: Callable[[], Mapping[str, float]] = dict,
    limits: RateLimits | None = None,
    metrics: DeclaredMetrics | None = None,
    most_bytes: int = 4 << 20,
) -> Any:
    """Build the ASGI application of the service with further ``routes``; ``pages`` check keys and bodies themselves.

    ``health_fields`` returns further fields of ``/health``, and ``further_metrics`` further metrics of ``/metrics``;
    both do no I/O. The application closes ``writer`` and ``reader`` when it ends. Each tenant has the ``limits`` twice:
    once for its OpenAI calls, once for its other requests. A body is read only after the key was checked, and a
    feedback may have ``most_bytes`` bytes. ``metrics`` are the metrics that feedback may have; None: those of a service
    that declares none.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.aclose()
        reader.close()
        writer.close()

    limits = limits or RateLimits()
    # no documentation pages: FastAPI's load scripts from other servers
    app = FastAPI(title="rft_platform online service", lifespan=lifespan, docs_url=None, redoc_url=None)
    errors.install(app)
    app.add_exception_handler(DatabaseUnavailableError, _unavailable)
    app.add_exception_handler(ReusedFeedbackIdError, _conflict)
    own = [
        _traffic_routes(gateway, writer, rule, metrics),
        _monitoring_routes(gateway, writer, reader, health_fields, limits, further_metrics),
    ]
    for each in (*own, *routes, *([] if pages is None else [pages])):
        app.include_router(each)
    return contained(_Guarded(app, gateway, limits, [] if pages is None else pages.routes, most_bytes))


def _traffic_routes(
    gateway: TrafficApp, writer: TrafficWriter, rule: CommitRule, metrics: DeclaredMetrics | None
) -> APIRouter:
    routes = APIRouter(route_class=parsing_route(_MOST_VALUES))

    @routes.post(_FEEDBACK)
    async def feedback(request: Request, given: FeedbackRequest) -> Response:
        """Label the calls that the feedback is about; the answer says how many calls were labelled."""
        tenant = gateway.tenant_of(headers_of(request.scope))
        _check_metrics(given, metrics or DeclaredMetrics.of_service())
        parts = _feedback_of(given, tenant)
        result = await writer.run(lambda store: store.give_feedback(*parts))
        counts = {"matched": result.matched, "duplicate": result.duplicate, "late": result.late}
        known = result.matched or result.duplicate or result.late
        body = {"status": "success" if known else "unknown", **counts, "unknown": list(result.unknown)}
        return JSONResponse(body, 200 if known else 404)

    @routes.post("/commit")
    async def commit(request: Request, given: CommitRequest | None = None) -> Response:
        """Commit labelled rows for training; the answer counts the committed rows and the groups that must wait."""
        tenant = gateway.tenant_of(headers_of(request.scope))
        scope = given or CommitRequest()
        age = None if scope.time_threshold is None else scope.time_threshold / 1000
        result = await writer.run(
            lambda store: store.commit(
                task_id=scope.task_id,
                run_id=scope.run_id,
                tenant=tenant,
                max_age_s=age,
                group_size=rule.group_size,
                group_deadline_s=rule.group_deadline_s,
            )
        )
        return JSONResponse(
            {"status": "success", "committed": result.committed, "pending_groups": result.pending_groups}
        )

    return routes


def _monitoring_routes(
    gateway: TrafficApp,
    writer: TrafficWriter,
    reader: TrafficReader,
    health_fields: Callable[[], Mapping[str, Any]],
    limits: RateLimits,
    further_metrics: Callable[[], Mapping[str, float]],
) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> Response:
        """Report that the service runs, whether its engine answers, and which policy version it serves."""
        return JSONResponse({"status": "ok", **await gateway.engine_health(), **health_fields()})

    @routes.get("/metrics")
    async def metrics(request: Request, format: str = Query(default="prometheus")) -> Response:
        """Counts of rows and requests, as Prometheus text or, with ``?format=json``, as JSON.

        A tenant gets counts of the rows and requests of this tenant, the tenant ``admin`` those of all and of the
        service. The counts of rows are left out while the database does not answer.
        """
        caller = gateway.tenant_of(headers_of(request.scope))
        tenant = None if caller in ("", ADMIN) else caller
        try:
            rows = await reader.run(lambda: writer.store.counts(tenant), _METRICS_S)
        except StorageError:
            rows = {}
        refused = limits.refused
        counts: dict[str, float] = {
            **{f"rows_{state}": number for state, number in rows.items()},
            **{f"requests_{name}": number for name, number in asdict(gateway.counts(tenant)).items()},
            "requests_refused_by_limit": refused.total()
            if tenant is None
            else refused[caller_of(tenant)] + refused[_other_caller(tenant)],
        }
        if tenant is None:
            counts |= {
                "calls_recorded": writer.counts.recorded,
                "calls_dropped": writer.counts.dropped,
                "calls_waiting": writer.waiting,
                "database_failures": writer.counts.failures,
                **further_metrics(),
            }
        if format == "json":
            return JSONResponse(counts)
        return PlainTextResponse("".join(f"rft_online_{name} {value}\n" for name, value in counts.items()))

    return routes


class _Guarded:
    """Sends OpenAI calls to the gateway, and checks all other requests: Host, Origin, key, then the body's size.

    OpenAI calls and other requests count for the limits of their tenant. The pages check the key themselves, because
    browsers send it as a Basic password.
    """

    def __init__(
        self, app: FastAPI, gateway: TrafficApp, limits: RateLimits, pages: Sequence[BaseRoute], most_bytes: int
    ) -> None:
        self._app = app
        self._gateway = gateway
        self._limits = limits
        self._pages = pages
        self._most_bytes = most_bytes
        self._hosts = configured_hosts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        free = scope["path"] in _PUBLIC or any(page.matches(scope)[0] != Match.NONE for page in self._pages)
        try:
            headers = headers_of(scope)
            check_caller(scope["method"], headers, self._hosts)
            tenant = "" if free else self._gateway.tenant_of(headers)
        except ApiError as error:
            await refuse_stranger(error, receive, send)
            return
        if free:
            await self._app(scope, receive, send)
        elif scope["path"].startswith("/v1/"):
            await self._limited(caller_of(tenant), self._gateway, scope, receive, send)
        else:
            await self._limited(_other_caller(tenant), self._with_body, scope, receive, send)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, refuse it if it is too large, then answer the request."""
        most = self._most_bytes if scope["path"] == _FEEDBACK else min(_MOST_BYTES, self._most_bytes)
        try:
            receive = replayed(await read_body(receive, most), receive)
        except ApiError as error:
            await send_error(error, send)
            return
        await self._app(scope, receive, send)

    async def _limited(self, caller: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request if its caller is within the limits, else refuse it with status 429."""
        with ExitStack() as stack:
            try:
                with refused_by_limit():
                    stack.enter_context(self._limits.admitted(caller))
            except ApiError as refusal:
                await refuse_stranger(refusal, receive, send)
                return
            await app(scope, receive, send)


def _other_caller(tenant: str) -> str:
    """The name under which the rate limits count the requests of a tenant that are no OpenAI calls."""
    return f"other/{tenant}"


async def _conflict(_: Request, error: Exception) -> Response:
    return JSONResponse(errors.error_body(409, str(error), "feedback_id_reused", "feedback_id"), 409)


async def _unavailable(_: Request, error: Exception) -> Response:
    return JSONResponse(errors.error_body(503, str(error), "database_unavailable"), 503)


def _check_metrics(given: FeedbackRequest, declared: DeclaredMetrics) -> None:
    """Raise ApiError if a metric of the feedback is not declared, or does not allow its value."""
    try:
        declared.numbers(given.values, names_answers=given.msg_ids is not None)
    except MetricError as error:
        raise ApiError(400, str(error), "invalid_metric", error.metric) from None


def _feedback_of(given: FeedbackRequest, tenant: str) -> list[NewFeedback]:
    """One feedback for each metric; the first one also has the comment and the correction."""
    rating = given.user_feedback
    values = given.values
    metric = next(iter(values), given.metric)
    first = NewFeedback(
        feedback_id=given.feedback_id or secrets.token_hex(16),
        msg_ids=given.msg_ids or (),
        value=values.pop(metric, None),
        metric=metric,
        task_id=given.task_id,
        run_id=given.run_id,
        conversation=given.conversation_id,
        comment=given.comment or (rating.comment if rating else None),
        correction=given.correction,
        choice=given.choice,
        tags=given.tags,
        request=given.model_dump(mode="json", exclude_none=True),
        tenant=tenant,
    )
    rest = replace(first, comment=None, correction=None, request={})
    return [first] + [
        replace(rest, feedback_id=further_id(first.feedback_id, name), metric=name, value=value)
        for name, value in values.items()
    ]
