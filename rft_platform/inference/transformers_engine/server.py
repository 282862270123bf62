"""The transformers engine's server process: application, lease, idle time-out and shutdown."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.utils.logging import disable_progress_bar

from rft_platform.cluster.local.service_process import EXIT_USER_ERROR, ServiceProcess
from rft_platform.common.errors import UserError
from rft_platform.common.redaction import hide
from rft_platform.inference.interface import VERSION_HEADER
from rft_platform.inference.serving import control_api
from rft_platform.inference.serving.api_guard import ApiGuard
from rft_platform.inference.serving.http_server import UNCOUNTED_PATHS, server_config
from rft_platform.inference.transformers_engine import openai_routes
from rft_platform.inference.transformers_engine.async_adapter import AsyncEngineAdapter
from rft_platform.inference.transformers_engine.engine import EngineSettings, TransformersEngine
from rft_platform.observability.log_context import HEADER, PhaseContext, log_context
from rft_platform.observability.logs import configure
from rft_platform.openai_api import errors

GRACE_S = 3  # how long a shutdown waits for open connections


def build_app(
    engine: TransformersEngine, service: ServiceProcess, stop: Callable[[], None], lifespan: Any = None
) -> ASGIApp:
    """The application: OpenAI and control routes and /health, with version headers, behind ``ApiGuard``."""
    app = FastAPI(title="rft transformers engine", docs_url=None, redoc_url=None, lifespan=lifespan)
    errors.install(app)
    openai_routes.install(app, engine)
    control_api.install(app, AsyncEngineAdapter(engine), stop)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.add_middleware(StampVersion, engine=engine, service=service)
    return ApiGuard(app, service.token)


class StampVersion:
    """Adds the policy version to every response that lacks it, and resets the idle time.

    Log lines of a request get the round, run and phase from the caller's header.
    """

    def __init__(self, app: ASGIApp, engine: TransformersEngine, service: ServiceProcess) -> None:
        self.app, self.engine, self.service = app, engine, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                version = str(self.engine.scheduler.served.policy_version)
                MutableHeaders(scope=message).setdefault(VERSION_HEADER, version)
            await send(message)

        use = nullcontext() if scope["path"] in UNCOUNTED_PATHS else self.service.in_use()
        with use, log_context(PhaseContext.from_header(Headers(scope=scope).get(HEADER, ""))):
            await self.app(scope, receive, stamped)


def serve(settings: EngineSettings, service: ServiceProcess) -> None:
    """Load the model, publish the lease, and serve until a stop request, a signal or the idle time-out."""
    configure("engine")
    disable_progress_bar()  # people and the launcher read the log
    engine = TransformersEngine(settings)
    listener = socket.create_server((service.host, service.port), backlog=1024)  # listens before the lease is published
    hide(service.token)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.publish(listener.getsockname()[1])
        watch = asyncio.create_task(service.stop_when_idle(lambda: engine.busy, stop))
        try:
            yield
        finally:  # in a finally block, because run() ends by raising the stopping signal again
            watch.cancel()
            service.withdraw()
            engine.close()

    def stop() -> None:
        server.should_exit = True

    app = build_app(engine, service, stop, lifespan)
    server = uvicorn.Server(server_config(app, GRACE_S, log_level="warning"))
    server.run(sockets=[listener])


def main(arguments: list[str]) -> int:
    """Run the server; exit code 2 and one line on standard error for wrong settings or a wrong model folder."""
    options = json.loads(arguments[0])
    settings = EngineSettings(**{**options["engine"], "model_path": Path(options["model_path"])})
    service = ServiceProcess.from_environment("engine-transformers")
    try:
        serve(settings, service)
    except UserError as error:
        one_line = " ".join(str(error).split())
        print(f"error: {one_line}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    return 0
