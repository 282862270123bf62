"""The platform's ASGI middleware inside vLLM's server, which creates ``EnginePlanes`` through ``--middleware``.

It serves the control plane below ``/engine``, holds requests to vLLM's own routes while weights change, puts the
policy version on every response, and publishes the lease once vLLM is ready.
"""

import asyncio
import atexit
import json
import logging
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rft_platform.cluster.local.service_process import ServiceProcess
from rft_platform.common.redaction import hide
from rft_platform.inference.interface import VERSION_HEADER
from rft_platform.inference.serving import control_api
from rft_platform.inference.serving.api_guard import ApiGuard
from rft_platform.inference.serving.http_server import UNCOUNTED_PATHS, TimedProtocol
from rft_platform.inference.serving.request_body import read_body, replayed
from rft_platform.inference.vllm_engine.engine import VllmEngine
from rft_platform.inference.vllm_engine.openai_wire import (
    SCHEMAS,
    checked_request,
    openai_error,
    stamped_answer,
    stamped_events,
)
from rft_platform.inference.vllm_engine.server_settings import ServerSettings
from rft_platform.observability.log_context import HEADER, PhaseContext, log_context
from rft_platform.observability.logs import configure
from rft_platform.openai_api import errors
from rft_platform.openai_api.answers import ServedModel
from rft_platform.openai_api.errors import ApiError, describe

LOG = logging.getLogger(__name__)
#: Routes of vLLM that are open, besides GET. Its other routes could change the engine without the platform's knowledge.
OPEN_ROUTES = {*SCHEMAS, "/tokenize", "/detokenize"}
MODEL_PREFIX = "/v1/models/"
START_POLL_S = 0.05


class EnginePlanes:
    """ASGI middleware around vLLM's application."""

    def __init__(self, app: ASGIApp) -> None:
        settings = ServerSettings.from_environment()
        self.app = app
        self.settings = settings
        self.service = ServiceProcess.from_environment("engine-vllm")
        self.engine: VllmEngine | None = None
        self._control: FastAPI | None = None
        self._guarded = ApiGuard(self._http, self.service.token)
        self._tasks: set[asyncio.Task[None]] = set()
        configure("engine")
        hide(self.service.token)
        atexit.register(self.service.withdraw)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._starting(scope["app"], send))
        elif scope["type"] == "http":
            await self._guarded(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "not served"})

    def _starting(self, app: FastAPI, send: Send) -> Send:
        """Wrap ``send``: start the engine after vLLM's application has started; remove the lease when it ends."""

        async def watched(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                task = asyncio.create_task(self._start(app))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif message["type"] == "lifespan.shutdown.complete":
                self.service.withdraw()
            await send(message)

        return watched

    async def _start(self, app: FastAPI) -> None:
        """Wrap vLLM's engine, warm it up, publish the lease, then wait and stop the server when it is idle."""
        try:
            engine = VllmEngine(app.state.engine_client, self.settings, self.stop)
            await engine.warm_up()
            self._control = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
            errors.install(self._control)
            control_api.install(self._control, engine, self.stop)
            self.engine = engine
            self.service.publish(await _port(app))
        except Exception:
            LOG.exception("the engine cannot be served")
            self.stop()
            return
        await self.service.stop_when_idle(lambda: engine.admission.running > 0, self.stop)

    def stop(self) -> None:
        """Remove the lease and end the server by SIGTERM; the server first completes running responses."""
        self.service.withdraw()
        asyncio.get_running_loop().call_later(START_POLL_S, signal.raise_signal, signal.SIGTERM)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        use = nullcontext() if path in UNCOUNTED_PATHS else self.service.in_use()
        with use, log_context(PhaseContext.from_header(Headers(scope=scope).get(HEADER, ""))):
            await self._dispatch(path, scope, receive, send)

    async def _dispatch(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self.engine
        if engine is None or self._control is None:
            await _refuse(ApiError(503, "the engine is starting", "engine_unavailable"), 0, scope, receive, send)
        elif path.startswith("/engine/"):
            await self._control(scope, receive, _Answer(send, engine).pass_on)
        elif path in SCHEMAS and scope["method"] == "POST":
            await self._sample(engine, path, scope, receive, send)
        elif path.startswith(MODEL_PREFIX) and scope["method"] == "GET":
            await self._model(engine, path.removeprefix(MODEL_PREFIX), scope, receive, send)
        elif scope["method"] in ("GET", "HEAD", "OPTIONS") or path in OPEN_ROUTES:
            await self.app(scope, receive, _Answer(send, engine).pass_on)
        else:
            error = ApiError(404, f"{path}: no such route", "not_found")
            await _refuse(error, engine.weights.served.policy_version, scope, receive, send)

    async def _model(self, engine: VllmEngine, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/models/NAME, a route that vLLM lacks."""
        version = engine.weights.served.policy_version
        try:
            entry = ServedModel(Path(self.settings.model_path), engine.max_model_len).entry(name)
        except ApiError as error:
            await _refuse(error, version, scope, receive, send)
            return
        await JSONResponse(entry, headers={VERSION_HEADER: str(version)})(scope, receive, send)

    async def _sample(self, engine: VllmEngine, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a sampling request, wait for admission, and pass it to vLLM; it runs on one version of the weights."""
        try:
            options = self.settings.template_options
            body = await read_body(receive)
            checked = await asyncio.to_thread(checked_request, path, body, engine.max_model_len, options)
            if checked.chat is not None:
                await asyncio.to_thread(engine.check_rendering, checked.chat)
        except Exception as error:
            await _refuse(error, engine.weights.served.policy_version, scope, receive, send)
            return
        async with engine.admission.request():
            engine.counts["requests"] += 1
            headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
            headers.append((b"content-length", str(len(checked.body)).encode()))
            answer = _Answer(send, engine, checked.constrained)
            try:
                await self.app({**scope, "headers": headers}, replayed(checked.body, receive), answer.stamp)
            except ValueError as error:  # how vLLM refuses some requests, such as n: 3 with temperature 0
                if answer.started:
                    raise
                await _refuse(ApiError(400, str(error), "invalid_value"), answer.version, scope, receive, send)


class _Answer:
    """Forwards a response, with the policy version that was served when the request started."""

    def __init__(self, send: Send, engine: VllmEngine, constrained: bool = False) -> None:
        self.send = send
        self.constrained = constrained
        self.version = engine.weights.served.policy_version
        self._start: Message = {}
        self._streams = False
        self._body = b""

    @property
    def started(self) -> bool:
        """Whether the response has begun."""
        return bool(self._start)

    async def pass_on(self, message: Message) -> None:
        """Forward a message of the response unchanged, except that the version header is added."""
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).setdefault(VERSION_HEADER, str(self.version))
        await self.send(message)

    async def stamp(self, message: Message) -> None:
        """Add the version to header and body; convert errors to OpenAI's form."""
        if message["type"] == "http.response.start":
            self._start = message
            self._streams = "event-stream" in Headers(raw=message["headers"]).get("content-type", "")
            if self._streams:
                await self.pass_on(message)
        elif self._streams:
            await self.send(
                {**message, "body": stamped_events(message.get("body", b""), self.version, self.constrained)}
            )
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish()

    async def _finish(self) -> None:
        status = self._start["status"]
        if status >= 400:
            self._body = json.dumps(openai_error(status, self._body)).encode()
        else:
            self._body = stamped_answer(self._body, self.version, self.constrained)
        MutableHeaders(scope=self._start)["content-length"] = str(len(self._body))
        await self.pass_on(self._start)
        await self.send({"type": "http.response.body", "body": self._body})


async def _refuse(error: Exception, version: int, scope: Scope, receive: Receive, send: Send) -> None:
    status, body = describe(error)
    await JSONResponse(body, status, headers={VERSION_HEADER: str(version)})(scope, receive, send)


async def _port(app: Any) -> int:
    """Wait until vLLM's server listens; return its port. New connections get time-outs (``TimedProtocol``)."""
    while True:
        server = getattr(app.state, "server", None)
        if server is not None and server.started:
            server.config.http_protocol_class = TimedProtocol  # the server reads it for every new connection
            return int(server.servers[0].sockets[0].getsockname()[1])
        await asyncio.sleep(START_POLL_S)
