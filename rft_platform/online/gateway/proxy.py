"""The gateway of production traffic: serves the policy's OpenAI API and records every complete answer.

Each request is first recorded as a separate run; feedback joins several requests to one run later. Headers or the
body's ``metadata`` of a request may name its task, run and conversation, and the subject (the person whose data it is).
"""

import asyncio
import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from rft_platform.common import json_codec
from rft_platform.common.errors import EngineError, RftError
from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.serving.request_body import parse_body
from rft_platform.online.gateway.limits import CallLimitError, CallLimits, LimitExceededError, RateLimits
from rft_platform.online.releases.routing import CANDIDATE, Route, Router, ServedEngine
from rft_platform.online.traffic.database import FIRST_IMPORTED
from rft_platform.online.traffic.incoming import ENGINE, TEMPLATE_HASH, NewCall
from rft_platform.online.traffic.selection import Selection, unit_of
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.openai_api.errors import ApiError
from rft_platform.rollout.recording.gateway import RecordingApp, RunRecord
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.httpx_compat import PARSED, many_connections, wire
from rft_platform.web_guard.checks import bearer_token, tokens_match

LOG = logging.getLogger(__name__)

TASK_HEADER, RUN_HEADER = "x-rft-task", "x-rft-run"
CONVERSATION_HEADER, SUBJECT_HEADER = "x-rft-conversation", "x-rft-subject"
OPT_OUT_HEADER = "x-rft-opt-out"  #: any value but "0" and "false": the call is served and not recorded
LONGEST_NAME = 200  #: characters of a task, run, conversation or subject

_SEEDS = 2**31
_RETRY_S = 0.5
_START_S = 30.0  # longest wait for the engine when a service starts again
_RETRY_AFTER_S = 10  # for clients of a service whose engine does not run yet
_NO_ENGINE = "http://127.0.0.1/v1"  # requests have this address until ``_to`` gives them that of their engine
_SERVER_ERROR = 500
#: Errors of a request whose engine is killed. Sampling has no side effect, so the request may be repeated.
_LOST = (wire.ReadError, wire.WriteError, wire.RemoteProtocolError)
_MODEL_FIELDS = ("object", "created", "owned_by", "max_model_len")  # of the engine's list of models
_PROBE_S = 0.8  # health checks of load balancers often wait one second
_FRESH_S = 2.0  # callers without a key may ask at any rate: one request in this time reaches the engine
_CALL_FIELDS = tuple(each.name for each in fields(ModelCall))


class EngineProbe:
    """Asks the engine for its list of models, which it answers beside its work; for use in one event loop."""

    def __init__(self, connections: Any) -> None:
        """``connections`` is the gateway's HTTP client."""
        self._connections = connections
        self._answers = False
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def __call__(self, engine: ServedEngine | None) -> dict[str, Any]:
        """``engine`` ("answers", "does not answer", "not started") and ``policy_version`` (None before an engine)."""
        if engine is None:
            return {"engine": "not started", "policy_version": None}
        async with self._lock:
            if time.monotonic() - self._asked_at > _FRESH_S:
                self._answers, self._asked_at = await self._ask(engine), time.monotonic()
        state = "answers" if self._answers else "does not answer"
        return {"engine": state, "policy_version": engine.status.policy_version}

    async def _ask(self, engine: ServedEngine) -> bool:
        history = RunHistory(engine.status.model_path, SamplingParams(1), 0)
        transport = engine.clients.async_transport(history, self._connections)
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), _PROBE_S)
        url = wire.URL(engine.base_url.rstrip("/") + "/models")
        try:
            async with asyncio.timeout(_PROBE_S):
                response = await transport.handle_async_request(
                    wire.Request("GET", url, extensions={"timeout": timeout})
                )
                await response.aread()
        except (wire.TransportError, RftError, TimeoutError):
            return False
        return bool(response.status_code == 200)


@dataclass(slots=True)
class GatewayCounts:
    """Requests since the start."""

    answered: int = 0
    not_selected: int = 0
    opted_out: int = 0
    failed_to_record: int = 0  # answers not recorded because of an error, for example of a selection strategy

    def __add__(self, other: "GatewayCounts") -> "GatewayCounts":
        return GatewayCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class TrafficRun(RunRecord):
    """One request of production traffic, with the engine that answers it."""

    def __init__(
        self, history: RunHistory, headers: Mapping[str, str], tenant: str, route: Route, connections: Any
    ) -> None:
        """``connections`` is the gateway's HTTP client, which all requests share."""
        super().__init__("", history, lambda run: self.route.engine.clients.async_transport(run, connections))
        self.headers = headers
        self.tenant = tenant
        self.route = route
        self.body: dict[str, Any] = {}  # of the request, when it has been read
        self.names: dict[str, str] = {}  # of the task, run, conversation and subject, when the body has been read
        self.reserved: float | None = None  # tokens of the caller's rate limit; None: the request is not admitted

    def move(self, route: Route) -> None:
        """Send the request to another engine from now on."""
        self.route, self._transport = route, None


class TrafficApp(RecordingApp):
    """Sends OpenAI calls of production clients to the policy, and queues the recorded calls for the database."""

    def __init__(
        self,
        find_engine: Callable[[], ServedEngine],
        writer: TrafficWriter,
        selection: Selection,
        sampling: SamplingParams,
        *,
        tenants: Mapping[str, str] | None = None,
        timeout_s: float = 1800.0,
        patience_s: float = 60.0,
        engine_needed: bool = True,
        model_name: str = "policy",
        limits: RateLimits | None = None,
        most_choices: int = 8,
        most_bytes: int = 4 << 20,
    ) -> None:
        """``find_engine`` finds or starts the engine; it blocks. ``tenants`` maps API keys to tenants.

        Answers name the model ``model_name``. A choice has at most ``sampling.max_tokens`` tokens, a request at most
        ``most_choices`` choices and ``most_bytes`` bytes. ``limits`` limit the tokens of a tenant.
        A request waits up to ``patience_s`` seconds for an engine that is being restarted. Without ``engine_needed``
        the service also starts if the engine does not: it takes feedback and commits, and answers chats with 503 until
        ``router.base`` is set.
        """
        self._find_engine = find_engine
        self.router = Router(find_engine() if engine_needed else _found_soon(find_engine))
        super().__init__(_NO_ENGINE, timeout_s, most_bytes)
        self._writer = writer
        self._selection = selection
        self._sampling = sampling
        self._tenants = dict(tenants or {})
        self._patience_s = patience_s
        self._connections = many_connections()
        self._finding: asyncio.Task[None] | None = None
        self._model_name = model_name
        self._limits = limits or RateLimits()
        self._call_limits = CallLimits(most_choices, sampling.max_tokens)
        self._counts = defaultdict[str, GatewayCounts](GatewayCounts)  # by tenant
        self._probe = EngineProbe(self._connections)

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """The tenant whose API key a request has. Raises ApiError (401) if keys are configured and it has none."""
        if not self._tenants:
            return ""
        given = bearer_token(headers)
        found = [tenant for key, tenant in self._tenants.items() if tokens_match(given, key)]
        if not found:
            raise ApiError(401, "this service needs an API key (`Authorization: Bearer KEY`)", "invalid_api_key")
        return found[0]

    def counts(self, tenant: str | None = None) -> GatewayCounts:
        """The requests of one tenant, or of all."""
        return sum(self._counts.values(), GatewayCounts()) if tenant is None else self._counts[tenant]

    async def engine_health(self) -> dict[str, Any]:
        """Whether the serving engine answers, and its policy version."""
        return await self._probe(self.router.base)

    def find_run(self, headers: Mapping[str, str]) -> TrafficRun:
        """A new run for the request. Its route is chosen after the body was read."""
        tenant = self.tenant_of(headers)
        try:
            route = Route(self.router.serving())
        except EngineError as error:
            raise ApiError(503, str(error), "engine_unavailable", retry_after_s=_RETRY_AFTER_S) from None
        path = route.engine.status.model_path
        history = RunHistory(path, self._sampling, random.randrange(_SEEDS), shown_model=self._model_name)
        return TrafficRun(history, headers, tenant, route, self._connections)

    async def admit(self, record: RunRecord, request: Any) -> None:
        """Parse the body, apply the limits of a call, and take its tokens from the caller's rate limit."""
        assert isinstance(record, TrafficRun)
        if request.method != "POST":
            return
        content = await request.aread()
        record.body = await parse_body(content)
        if not isinstance(record.body, dict):
            raise ApiError(400, f"the body must be a JSON object, not {type(record.body).__name__}", "invalid_value")
        if json_codec.has_nul(content):
            raise ApiError(400, "a text of the body contains NUL: remove this character", "invalid_value")
        try:
            tokens = self._call_limits.apply(record.body, len(content))
        except CallLimitError as error:
            raise ApiError(400, str(error), "invalid_value", error.name) from None
        record.names = names_of(record.headers, record.body, record_keys=not self._tenants)
        request.extensions[PARSED] = record.body
        with refused_by_limit():
            record.reserved = self._limits.reserve_tokens(caller_of(record.tenant), tokens)

    def ended(self, record: RunRecord, *, cancelled: bool) -> None:
        """Count the tokens that the request has used; a cancelled one may have used all that it could."""
        assert isinstance(record, TrafficRun)
        calls = record.history.calls()
        if record.reserved is not None and (calls or not cancelled):
            choices = int(record.body.get("n") or 1)  # of each prompt; the limits of a call have checked the number
            prompts = {call.choice // choices: len(call.prompt_ids) for call in calls}
            used = sum(len(call.response_ids) for call in calls) + sum(prompts.values())
            self._limits.settle_tokens(caller_of(record.tenant), record.reserved, used)

    async def send(self, record: RunRecord, request: Any) -> Any:
        """Send a request to the engine of its route. If a release's candidate fails to answer, the base answers.

        If the base cannot be reached, the engine is found or started again and the request is repeated. If the
        connection to the base is lost during an answer, the request is repeated only once, because the request itself
        may be what kills the engine.
        """
        assert isinstance(record, TrafficRun)
        content = await request.aread()
        if request.method == "GET":
            return await self._models(record, request, content)
        record.move(self.router.route(record.headers, record.names, f"{random.getrandbits(64):016x}"))
        if record.route.arm == CANDIDATE:
            response = await self._ask_candidate(record, request, content)
            if response is not None:
                return response
            record.move(Route(self.router.serving()))
        deadline, lost = time.monotonic() + self._patience_s, False
        while True:
            try:
                return await record.transport.handle_async_request(_to(record.route.engine, request, content))
            except (wire.ConnectError, wire.ConnectTimeout):
                if time.monotonic() > deadline:
                    raise
            except _LOST as error:
                if lost:
                    raise
                lost = True
                LOG.warning("lost the connection to the engine during an answer; the request is repeated: %r", error)
            await self._find_again()
            await asyncio.sleep(_RETRY_S)
            record.move(replace(record.route, engine=self.router.serving()))

    async def _models(self, record: TrafficRun, request: Any, content: bytes) -> Any:
        """The engine's list of models, with the model's name instead of its folder."""
        response = await record.transport.handle_async_request(_to(record.route.engine, request, content))
        answer = _object(await response.aread())
        models = [each for each in answer.get("data") or [] if isinstance(each, dict)]
        shown = [{name: value for name, value in each.items() if name in _MODEL_FIELDS} for each in models[:1]]
        listed = json_codec.dump({"object": "list", "data": [{**each, "id": self._model_name} for each in shown]})
        return wire.Response(response.status_code, headers={"content-type": "application/json"}, content=listed)

    async def _ask_candidate(self, record: TrafficRun, request: Any, content: bytes) -> Any | None:
        """The answer of the candidate version; None if it does not answer or has a server error."""
        try:
            response = await record.transport.handle_async_request(_to(record.route.engine, request, content))
        except (wire.TransportError, RftError) as error:
            LOG.warning("the candidate version does not answer (%r); the base version answers this request", error)
        else:
            if response.status_code < _SERVER_ERROR:
                return response
            LOG.warning(
                "the candidate version answers with status %d; the base version answers this request",
                response.status_code,
            )
            await response.aclose()
        self.router.candidate_failures += 1
        return None

    async def _find_again(self) -> None:
        """Find or start the engine, once for all requests that wait for it."""
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._replace_engine())
        await asyncio.shield(self._finding)

    async def _replace_engine(self) -> None:
        try:
            self.router.base = await asyncio.to_thread(self._find_engine)
        except Exception as error:
            LOG.warning("the engine cannot be found or started: %s", error)

    def before_sending(self, record: RunRecord, headers: Mapping[str, str]) -> None:
        """Queue the recorded choices of an answer before its last bytes are sent, so that feedback finds the choices.

        An error here, for example of a selection strategy, is logged and counted; the chat request does not fail.
        """
        assert isinstance(record, TrafficRun)
        calls = record.history.extract()
        if not calls:
            return
        counts = self._counts[record.tenant]
        counts.answered += 1
        try:
            self._queue(calls, record, headers, counts)
        except Exception:
            counts.failed_to_record += 1
            LOG.exception("an answered call was not recorded")

    def _queue(
        self, calls: list[ModelCall], record: TrafficRun, headers: Mapping[str, str], counts: GatewayCounts
    ) -> None:
        """Queue the choices of one answer, unless the caller opted out or no strategy selects it."""
        if headers.get(OPT_OUT_HEADER, "0").lower() not in ("0", "false"):
            counts.opted_out += 1
            return
        route, tenant, names = record.route, record.tenant, record.names
        unit = unit_of(tenant, names, calls[0].msg_id)
        decision = self._selection.decide(record.body, calls[0].response, unit, headers, tenant)
        if not decision.accept:
            counts.not_selected += 1
            return
        status = route.engine.status
        served_by = {ENGINE: status.engine, TEMPLATE_HASH: status.template_hash}
        for call in calls:
            self._writer.record(
                NewCall(
                    msg_id=call.msg_id,
                    choice=call.choice,
                    model_call={name: getattr(call, name) for name in _CALL_FIELDS} | served_by,
                    policy_version=call.policy_version,
                    tokens=len(call.prompt_ids) + len(call.response_ids),
                    recorded_at=call.created_at,
                    tenant=tenant,
                    variant=route.variant,
                    trainable=_is_trainable(call),
                    **names,
                )
            )

    async def aclose(self) -> None:
        """Close the connections to the engine."""
        await self._connections.aclose()


def caller_of(tenant: str) -> str:
    """The name under which the rate limits count the OpenAI calls of a tenant."""
    return f"openai/{tenant}"


@contextmanager
def refused_by_limit() -> Iterator[None]:
    """Raise ApiError (429) instead of LimitExceededError."""
    try:
        yield
    except LimitExceededError as limit:
        message = f"{limit}: send the request again in {limit.retry_after_s} s"
        raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=limit.retry_after_s) from None


def _found_soon(find_engine: Callable[[], ServedEngine]) -> ServedEngine | None:
    """The engine, or None if it cannot be started or takes longer than ``_START_S``."""
    found: list[ServedEngine] = []

    def find() -> None:
        try:
            found.append(find_engine())
        except Exception as error:
            LOG.error("the service starts without an engine: %s", error)

    finding = threading.Thread(target=find, name="engine", daemon=True)
    finding.start()
    finding.join(_START_S)
    return found[0] if found else None


def _object(content: bytes) -> dict[str, Any]:
    """A JSON body as a dictionary; empty for any other body."""
    try:
        return json_codec.parse_object(content)
    except (RftError, ValueError):
        return {}


def _to(engine: ServedEngine, request: Any, content: bytes) -> Any:
    """A copy of the request that is addressed to an engine."""
    url, headers = _url(engine.base_url, request.url.path), wire.Headers(request.headers)
    headers["host"] = url.netloc.decode()
    return wire.Request(request.method, url, headers=headers, content=content, extensions=request.extensions)


@lru_cache(maxsize=64)
def _url(base_url: str, path: str) -> Any:
    return wire.URL(base_url.rstrip("/") + path.removeprefix("/v1"))


def names_of(headers: Mapping[str, str], request: Mapping[str, Any], *, record_keys: bool = True) -> dict[str, str]:
    """Task, run, conversation and subject that a request names in headers, ``metadata``, ``user`` or its bearer key.

    With ``record_keys`` a bearer key ``<batch>/<task>/<run>`` names task and run as well. Where clients have API keys,
    the bearer key is a secret and never a name. Raises ApiError (400) if the subject is too long: cut, it would name
    several persons, and ``rft forget`` would not find it.
    """
    metadata = request.get("metadata")
    named = dict(metadata) if isinstance(metadata, Mapping) else {}
    batch, _, rest = ((bearer_token(headers) if record_keys else None) or "").partition("/")
    task, _, run = rest.rpartition("/")
    key = {"task_id": f"{batch}/{task}", "run_id": run} if batch and task and run else {}
    candidates = {
        "task_id": (headers.get(TASK_HEADER), named.get("task_id"), key.get("task_id")),
        "run_id": (headers.get(RUN_HEADER), named.get("run_id"), key.get("run_id")),
        "conversation": (headers.get(CONVERSATION_HEADER), named.get("conversation_id")),
        "subject": (headers.get(SUBJECT_HEADER), named.get("subject"), request.get("user")),
    }
    found = {name: next((value for value in values if value is not None), None) for name, values in candidates.items()}
    texts = {name: str(value) for name, value in found.items() if value is not None}
    if (length := len(texts.get("subject", ""))) > LONGEST_NAME:
        message = f"the subject has {length} characters, at most {LONGEST_NAME} are allowed: send a shorter id"
        raise ApiError(400, message, "invalid_value", "subject")
    return {name: text[:LONGEST_NAME] for name, text in texts.items()}


def _is_trainable(call: ModelCall) -> bool:
    """Whether importance ratios of the call can be computed, and weights of this project sampled it."""
    imported = call.policy_version is not None and call.policy_version > FIRST_IMPORTED
    return call.temperature > 0 and call.top_p >= 1 and call.top_k <= 0 and not imported
