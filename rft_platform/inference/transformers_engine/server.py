"""The engine's own process: from its settings to a served port, a lease and a clean end."""

import asyncio
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.utils.logging import disable_progress_bar

from rft_platform.errors import UserError
from rft_platform.inference.transformers_engine import api_errors, control_api, openai_api
from rft_platform.inference.transformers_engine.engine import EngineSettings, TransformersEngine
from rft_platform.processes.lease import Lease, remove_lease, write_lease

HOST = "127.0.0.1"
UNCOUNTED_PATHS = ("/health", "/v1/models")  # monitoring must not keep an unused engine alive
KEEP_ALIVE_S = 600  # longer than any client keeps an idle connection, so that none is closed as it is used again
GRACE_S = 3  # for open connections, once the server is to stop
EXIT_USER_ERROR = 2


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What the launcher hands over on the command line."""

    lease: Path
    model_digest: str
    idle_timeout_s: float
    engine: EngineSettings


def build_app(engine: TransformersEngine, token: str, stop: Callable[[], None], lifespan: Any = None) -> FastAPI:
    """Both planes, health, the version on every answer."""
    app = FastAPI(title="rft transformers engine", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    api_errors.install(app)
    openai_api.install(app, engine)
    control_api.install(app, engine, token, stop)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    app.add_middleware(StampVersion, engine=engine)
    return app


class StampVersion:
    """Puts the policy version on every answer that does not name its own, and notes that the engine is needed."""

    def __init__(self, app: ASGIApp, engine: TransformersEngine) -> None:
        self.app, self.engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"] not in UNCOUNTED_PATHS:
            self.engine.touch()

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                version = str(self.engine.scheduler.served.policy_version)
                MutableHeaders(scope=message).setdefault(openai_api.VERSION_HEADER, version)
            await send(message)

        return await self.app(scope, receive, stamped)


def serve(settings: ServerSettings) -> None:
    """Load the model, publish the lease, serve until told to stop, signalled, or idle for too long."""
    disable_progress_bar()  # the log is read by people and by the launcher
    engine = TransformersEngine(settings.engine)
    listener = socket.create_server((HOST, 0), backlog=1024)  # listens from here on: no caller can come too early
    token = secrets.token_urlsafe(32)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        write_lease(settings.lease, _lease(settings, listener.getsockname()[1], token))
        watch = asyncio.create_task(_stop_when_idle(engine, settings.idle_timeout_s, stop))
        try:
            yield
        finally:  # here and not after run(), which ends by raising again the signal that stopped it
            watch.cancel()
            remove_lease(settings.lease, os.getpid())
            engine.close()

    def stop() -> None:
        server.should_exit = True

    app = build_app(engine, token, stop, lifespan)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener])


async def _stop_when_idle(engine: TransformersEngine, timeout_s: float, stop: Callable[[], None]) -> None:
    left = timeout_s
    while left > 0:
        await asyncio.sleep(left)
        left = timeout_s - engine.idle_seconds
    print(f"no request for {timeout_s:g} s: the engine ends", flush=True)
    stop()


def _lease(settings: ServerSettings, port: int, token: str) -> Lease:
    created = psutil.Process().create_time()
    return Lease("engine-transformers", os.getpid(), created, HOST, port, token, settings.model_digest, time.time(), {})


def main(arguments: list[str]) -> int:
    """Exit code 2 and one line on standard error where the settings or the model folder are at fault."""
    given = json.loads(arguments[0])
    engine = EngineSettings(**{**given.pop("engine"), "model_path": Path(given.pop("model_path"))})
    settings = ServerSettings(**{**given, "lease": Path(given["lease"]), "engine": engine})
    try:
        serve(settings)
    except UserError as error:
        one_line = " ".join(str(error).split())
        print(f"error: {one_line}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    return 0
