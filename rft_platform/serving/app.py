"""The online service's HTTP API: chat, feedback, commit, health and metrics. Every answer is JSON but the metrics.

``/v1/*`` is the policy's OpenAI API (``gateway``). Feedback and commit answer only after the database has them on disk.
"""

import math
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from starlette.types import Receive, Scope, Send

from rft_platform.common.errors import StorageError
from rft_platform.inference.serving import api_errors
from rft_platform.inference.serving.api_errors import ApiError
from rft_platform.inference.serving.api_guard import check_caller, contained, headers_of, send_error
from rft_platform.serving.gateway import LONGEST_NAME, TrafficApp
from rft_platform.serving.traffic import MOST_IDS, REWARD, NewFeedback
from rft_platform.serving.writer import TrafficWriter
from rft_platform.web_guard.checks import configured_hosts

_METRICS_S = 2.0  # a scrape waits this long for the database
_LONGEST_TEXT = 100_000  # characters of a comment or a correction

Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Text = Annotated[str, Field(max_length=_LONGEST_TEXT)]


@dataclass(frozen=True, slots=True)
class CommitRule:
    """When labelled rows are committed."""

    group_size: int = 1  # runs of a task that are committed together
    group_deadline_s: float = 3600.0  # a smaller group is committed when its first label is this old


class UserFeedback(BaseModel):
    """A rating by a person, with a comment."""

    rating: float | None = None
    comment: Text | None = None


class FeedbackRequest(BaseModel):
    """How well a run did: the ids of its answers and a reward, or the value of another declared metric."""

    model_config = ConfigDict(extra="ignore")

    msg_ids: list[Name] | None = Field(default=None, max_length=MOST_IDS)
    reward: float | None = None
    task_id: Name | None = None
    run_id: Name | None = None
    conversation_id: Name | None = None
    feedback_id: Name | None = None
    metric: Name = REWARD
    value: float | None = None
    comment: Text | None = None
    correction: Text | None = None
    tags: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    user_feedback: UserFeedback | None = None

    @field_validator("run_id", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("reward", "value")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError("expected a finite number")
        return value

    @model_validator(mode="after")
    def _names_something(self) -> "FeedbackRequest":
        if self.msg_ids is None and self.conversation_id is None and (self.task_id is None or self.run_id is None):
            raise ValueError(
                "msg_ids is missing: expected the ids of the answers, a conversation_id, or task_id and run_id"
            )
        if self.msg_ids is not None and not self.msg_ids:
            raise ValueError("msg_ids is empty: expected the ids of the answers that the feedback is about")
        says = (self.reward, self.value, self.comment, self.correction, self.user_feedback)
        if all(each is None for each in says):
            raise ValueError("reward is missing: expected a finite number, a value, a comment or a correction")
        return self


class CommitRequest(BaseModel):
    """Which labelled rows to commit; without any field all of them."""

    model_config = ConfigDict(extra="ignore")

    task_id: Name | None = None
    run_id: Name | None = None
    time_threshold: int | None = Field(default=None, ge=0)  # milliseconds; rows labelled earlier stay

    @field_validator("run_id", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def build_app(
    gateway: TrafficApp,
    writer: TrafficWriter,
    rule: CommitRule,
    status: Callable[[], Mapping[str, Any]],
    routes: Sequence[APIRouter] = (),
) -> Any:
    """The ASGI application of the service with further ``routes``.

    ``status`` says what else ``/health`` reports; it does no I/O.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.aclose()
        writer.close()

    app = FastAPI(title="rft_platform online service", lifespan=lifespan)
    api_errors.install(app)
    for each in routes:
        app.include_router(each)

    @app.post("/feedback")
    async def feedback(request: Request, given: FeedbackRequest) -> Response:
        """Label the calls that the feedback is about; the answer counts them."""
        tenant = gateway.tenant_of(headers_of(request.scope))
        result = await writer.run(lambda store: store.give_feedback(_feedback_of(given, tenant)))
        counts = {"matched": result.matched, "duplicate": result.duplicate, "late": result.late}
        known = result.matched or result.duplicate or result.late
        body = {"status": "success" if known else "unknown", **counts, "unknown": list(result.unknown)}
        return JSONResponse(body, 200 if known else 404)

    @app.post("/commit")
    async def commit(request: Request, given: CommitRequest | None = None) -> Response:
        """Hand labelled rows to training; the answer counts rows and the groups that are held back."""
        gateway.tenant_of(headers_of(request.scope))
        scope = given or CommitRequest()
        age = None if scope.time_threshold is None else scope.time_threshold / 1000
        result = await writer.run(
            lambda store: store.commit(
                task_id=scope.task_id,
                run_id=scope.run_id,
                max_age_s=age,
                group_size=rule.group_size,
                group_deadline_s=rule.group_deadline_s,
            )
        )
        return JSONResponse(
            {"status": "success", "committed": result.committed, "pending_groups": result.pending_groups}
        )

    @app.get("/health")
    async def health() -> Response:
        """Whether the service runs, and what it serves."""
        return JSONResponse({"status": "ok", **status()})

    @app.get("/metrics")
    async def metrics(format: str = Query(default="prometheus")) -> Response:
        """Counts of rows and requests, as Prometheus text or, with ``?format=json``, as JSON.

        The counts of rows are missing while the database does not answer.
        """
        try:
            rows = await writer.run(lambda store: store.counts(), _METRICS_S)
        except StorageError:
            rows = {}
        counts = {f"rows_{state}": number for state, number in rows.items()} | {
            "requests_answered": gateway.counts.answered,
            "requests_not_selected": gateway.counts.not_selected,
            "requests_opted_out": gateway.counts.opted_out,
            "requests_failed_to_record": gateway.counts.failed_to_record,
            "calls_recorded": writer.counts.recorded,
            "calls_dropped": writer.counts.dropped,
            "calls_waiting": writer.waiting,
            "database_failures": writer.counts.failures,
        }
        if format == "json":
            return JSONResponse(counts)
        return PlainTextResponse("".join(f"rft_online_{name} {value}\n" for name, value in counts.items()))

    return contained(_Guarded(app, gateway))


class _Guarded:
    """Sends OpenAI calls to the gateway and checks Host and Origin of all other requests."""

    def __init__(self, app: FastAPI, gateway: TrafficApp) -> None:
        self._app = app
        self._gateway = gateway
        self._hosts = configured_hosts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            await self._gateway(scope, receive, send)
            return
        if scope["type"] == "http":
            try:
                check_caller(scope["method"], headers_of(scope), self._hosts)
            except ApiError as error:
                await send_error(error, send, close=True)
                return
        await self._app(scope, receive, send)


def _feedback_of(given: FeedbackRequest, tenant: str) -> NewFeedback:
    rating = given.user_feedback
    value = given.reward if given.value is None else given.value
    return NewFeedback(
        feedback_id=given.feedback_id or secrets.token_hex(16),
        msg_ids=given.msg_ids or (),
        value=value,
        metric=given.metric,
        task_id=given.task_id,
        run_id=given.run_id,
        conversation=given.conversation_id,
        comment=given.comment or (rating.comment if rating else None),
        correction=given.correction,
        tags=given.tags,
        request=given.model_dump(mode="json", exclude_none=True),
        tenant=tenant,
    )
