"""A service for tests of clusters: it answers ``/health``, repeats ``/echo`` for callers with the token, and ends when
it is idle. argv: the text that it repeats. Of a group of ranks the first one does this, and the others wait."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rft_platform.cluster.local.service_process import EXIT_USER_ERROR, ServiceProcess, end_with_starter
from rft_platform.inference.serving.api_guard import ApiGuard


def main(text: str) -> None:
    """Serve until it is idle or told to end; the text "wrong" counts as a wrong setting."""
    if text == "wrong":
        print("error: the text is wrong", flush=True)
        sys.exit(EXIT_USER_ERROR)
    if os.environ.get("RANK", "0") != "0":
        end_with_starter()
        time.sleep(float(os.environ.get("ECHO_FOLLOWS_S", "600")))
        return
    service = ServiceProcess.from_environment("echo")
    print("imports\n0 %\r50 %\rno", end="", flush=True)
    time.sleep(float(os.environ.get("ECHO_DELAY_S", "0")))
    print(f"thing\nrepeats {text}", flush=True)
    time.sleep(float(os.environ.get("ECHO_DELAY_S", "0")))

    def stop() -> None:
        server.should_exit = True

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.publish(listener.getsockname()[1], text=text)
        task = asyncio.create_task(service.stop_when_idle(lambda: False, stop))
        try:
            yield
        finally:
            task.cancel()
            service.withdraw()

    async def health(_: Request) -> Response:
        return JSONResponse({})

    async def echo(_: Request) -> Response:
        service.touch()
        return PlainTextResponse(text)

    async def shutdown(_: Request) -> Response:
        print("ends after its work", flush=True)
        stop()
        return JSONResponse({})

    routes = [Route("/health", health), Route("/echo", echo), Route("/shutdown", shutdown, methods=["POST"])]
    app = ApiGuard(Starlette(routes=routes, lifespan=lifespan), service.token)
    listener = socket.create_server((service.host, service.port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[listener])
    if "ECHO_WORK_S" in os.environ:
        time.sleep(float(os.environ["ECHO_WORK_S"]))
        print("its work is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
