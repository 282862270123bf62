"""The gateway of production traffic: serves the policy's OpenAI API and records every complete answer.

Each request is a run of its own for the recorder that rollouts use; feedback joins requests to runs later. A request
may name its place by headers or by its body's ``metadata``: task, run, conversation, and the subject whose data it is.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import EngineStatus, SamplingParams
from rft_platform.inference.serving import json_codec
from rft_platform.inference.serving.api_errors import ApiError
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.gateway import RecordingApp, RunRecord
from rft_platform.rollout.recording.gateway_connections import GatewayConnections
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.httpx_compat import wire
from rft_platform.serving.selection import Selection
from rft_platform.serving.traffic import ENGINE, TEMPLATE_HASH, NewCall
from rft_platform.serving.writer import TrafficWriter
from rft_platform.web_guard.checks import bearer_token, tokens_match

LOG = logging.getLogger(__name__)

TASK_HEADER, RUN_HEADER = "x-rft-task", "x-rft-run"
CONVERSATION_HEADER, SUBJECT_HEADER = "x-rft-conversation", "x-rft-subject"
OPT_OUT_HEADER = "x-rft-opt-out"  #: any value but "0" and "false": the call is served and not recorded
LONGEST_NAME = 200  #: characters of a task, run, conversation or subject

_SEEDS = 2**31
_RETRY_S = 0.5
_CALL_FIELDS = tuple(each.name for each in fields(ModelCall))


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine that serves the policy, and how its calls are recorded."""

    status: EngineStatus
    clients: RecordingClients
    base_url: str


@dataclass(slots=True)
class GatewayCounts:
    """Requests since the start."""

    answered: int = 0
    not_selected: int = 0
    opted_out: int = 0
    failed_to_record: int = 0  # answers that an error, for example of a selection strategy, kept from being recorded


class TrafficApp(RecordingApp):
    """Sends OpenAI calls of production clients to the policy, and queues what was recorded for the database."""

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
    ) -> None:
        """``find_engine`` finds or starts the engine; it blocks. ``tenants`` maps API keys to tenants.

        A request waits up to ``patience_s`` seconds for an engine that is being restarted.
        """
        self._find_engine = find_engine
        self._engine = find_engine()
        super().__init__(self._engine.base_url, timeout_s)
        self._writer = writer
        self._selection = selection
        self._sampling = sampling
        self._tenants = dict(tenants or {})
        self._patience_s = patience_s
        self._connections = GatewayConnections()
        self._finding: asyncio.Task[None] | None = None
        self.counts = GatewayCounts()

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """The tenant whose API key a request carries; raises ApiError (401) for none where keys are configured."""
        if not self._tenants:
            return ""
        given = bearer_token(headers)
        found = [tenant for key, tenant in self._tenants.items() if tokens_match(given, key)]
        if not found:
            raise ApiError(401, "this service needs an API key (`Authorization: Bearer KEY`)", "invalid_api_key")
        return found[0]

    def find_run(self, headers: Mapping[str, str]) -> RunRecord:
        """A new run for the request, with the place that its headers or its record key name."""
        self.tenant_of(headers)
        engine = self._engine
        history = RunHistory(engine.status.model_path, self._sampling, secrets.randbelow(_SEEDS))
        return RunRecord("", history, lambda run: engine.clients.async_transport(run, self._connections))

    async def send(self, record: RunRecord, request: Any) -> Any:
        """Send a request; if the engine cannot be reached, find it again and repeat the request."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await record.transport.handle_async_request(request)
            except (wire.ConnectError, wire.ConnectTimeout):
                if time.monotonic() > deadline:
                    raise
            await self._find_again()
            await asyncio.sleep(_RETRY_S)
            path = request.url.path.removeprefix("/v1")
            root = self._engine.base_url.rstrip("/")
            request = wire.Request(
                request.method,
                wire.URL(root + path),
                headers=request.headers,
                content=await request.aread(),
                extensions=request.extensions,
            )

    async def _find_again(self) -> None:
        """Find or start the engine, once for all requests that wait for it."""
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(self._replace_engine())
        await asyncio.shield(self._finding)

    async def _replace_engine(self) -> None:
        try:
            self._engine = await asyncio.to_thread(self._find_engine)
        except Exception as error:
            LOG.warning("the engine cannot be found or started: %s", error)
            return
        self.set_engine(self._engine.base_url)

    def before_sending(self, record: RunRecord, headers: Mapping[str, str], body: bytes) -> None:
        """Queue the recorded choices of an answer before its last bytes are sent: feedback then finds them.

        Nothing here fails a chat request: an error of a selection strategy is logged and counted.
        """
        calls = record.history.extract()
        if not calls:
            return
        self.counts.answered += 1
        try:
            self._queue(calls, headers, body)
        except Exception:
            self.counts.failed_to_record += 1
            LOG.exception("an answered call was not recorded")

    def _queue(self, calls: list[ModelCall], headers: Mapping[str, str], body: bytes) -> None:
        """Queue the choices of one answer, unless the caller opted out or no strategy selects it."""
        if headers.get(OPT_OUT_HEADER, "0").lower() not in ("0", "false"):
            self.counts.opted_out += 1
            return
        request = json_codec.parse_object(body)
        place = place_of(headers, request)
        tenant = self.tenant_of(headers)
        unit = place.get("run_id") or place.get("conversation") or calls[0].msg_id
        decision = self._selection.decide(request, calls[0].response, unit, headers, tenant)
        if not decision.accept:
            self.counts.not_selected += 1
            return
        status = self._engine.status
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
                    **place,
                )
            )

    async def aclose(self) -> None:
        """Close the connections to the engine."""
        await self._connections.aclose()


def place_of(headers: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, str]:
    """Task, run, conversation and subject of a request: from its headers, its ``metadata``, ``user``, or record key.

    A bearer key ``<batch>/<task>/<run>`` names task and run as well.
    """
    metadata = request.get("metadata")
    named = dict(metadata) if isinstance(metadata, Mapping) else {}
    batch, _, rest = (bearer_token(headers) or "").partition("/")
    task, _, run = rest.rpartition("/")
    key = {"task_id": f"{batch}/{task}", "run_id": run} if batch and task and run else {}
    candidates = {
        "task_id": (headers.get(TASK_HEADER), named.get("task_id"), key.get("task_id")),
        "run_id": (headers.get(RUN_HEADER), named.get("run_id"), key.get("run_id")),
        "conversation": (headers.get(CONVERSATION_HEADER), named.get("conversation_id")),
        "subject": (headers.get(SUBJECT_HEADER), named.get("subject"), request.get("user")),
    }
    found = {name: next((value for value in values if value is not None), None) for name, values in candidates.items()}
    return {name: str(value)[:LONGEST_NAME] for name, value in found.items() if value is not None}
