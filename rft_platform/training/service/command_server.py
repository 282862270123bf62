"""HTTP server of the trainer group: runs one command at a time, and answers status and cancel meanwhile.

``POST /trainer/train``, ``/trainer/score`` and ``/trainer/shutdown`` queue a command and stream its events as JSON
lines: ``accepted``, heartbeats, the events of the command, and ``done`` or ``error``. The server runs in a thread; the
caller of ``next_job`` does the work.
"""

import asyncio
import json
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rft_platform.cluster.local.service_process import ServiceProcess
from rft_platform.inference.serving.api_guard import ApiGuard
from rft_platform.inference.serving.http_server import ServerThread
from rft_platform.inference.serving.request_body import json_object
from rft_platform.observability.log_context import HEADER, PhaseContext
from rft_platform.openai_api.errors import ApiError, describe
from rft_platform.training.protocol import HEARTBEAT, HEARTBEAT_S, LAST_EVENTS, PREFIX, Message

_GRACE_S = 5  # how long a closing server waits for streams in progress
_QUEUED = ("train", "score", "shutdown")


@dataclass(slots=True)
class Job:
    """A queued command; ``send`` streams events to its caller."""

    command: Message
    context: PhaseContext
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)

    def send(self, event: Message) -> None:
        """Stream an event. The job continues if the caller has disconnected."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class CommandServer:
    """Listens on ``port`` of the service's host. Every request must present the service's token."""

    def __init__(
        self, service: ServiceProcess, status: Callable[[], Message], beats: Callable[[], bool] = lambda: True
    ) -> None:
        """``beats`` returns whether the group can make progress; no heartbeat is sent while it returns False."""
        self._service = service
        self._beats = beats
        self.cancelled = threading.Event()
        self._status = status
        self._jobs: queue.Queue[Job | None] = queue.Queue()  # None: no command follows
        self._lock = threading.Lock()
        self._unfinished = 0  # commands that are queued or running
        self._running: Job | None = None
        self._closed = False
        routes = [Route(f"{PREFIX}{name}", self._queue, methods=["POST"], name=name) for name in _QUEUED]
        routes.append(Route("/health", self._answer_health))
        routes.append(Route(f"{PREFIX}status", self._answer_status, methods=["POST"]))
        routes.append(Route(f"{PREFIX}cancel", self._answer_cancel, methods=["POST"]))
        listener = socket.create_server((service.host, 0), backlog=128)
        self.port: int = listener.getsockname()[1]
        app = Starlette(routes=routes, exception_handlers={ApiError: _refuse})
        guarded = ApiGuard(app, service.token, control_prefix=PREFIX)
        self._server = ServerThread(guarded, listener, "trainer-commands", _GRACE_S)
        loop = self._server.running_loop
        assert loop is not None  # the server runs until ``close``
        asyncio.run_coroutine_threadsafe(service.stop_when_idle(lambda: self._unfinished > 0, self._stop), loop)

    def next_job(self) -> Job | None:
        """Wait for the next command; None after the idle time-out, from which on no further command is accepted."""
        if (job := self._jobs.get()) is None:
            return None
        with self._lock:
            self.cancelled.clear()
            self._running = job
        return job

    def finish(self, job: Job, event: Message) -> None:
        """End the running job with its last event."""
        with self._lock:
            self._running = None
            self._service.touch()  # first: a service that is not busy ends by the time of its last use
            self._unfinished -= 1
        job.send(event)

    def _stop(self) -> None:
        """Accept no further commands. It runs in the event loop, as ``_queue`` does: nothing is queued meanwhile."""
        self._closed = True
        self._jobs.put(None)

    def close(self) -> None:
        """Stop listening after the callers have received all events that were sent."""
        self._server.close()

    async def _answer_health(self, request: Request) -> Response:
        return JSONResponse({}, 503 if self._closed else 200)

    async def _answer_status(self, request: Request) -> Response:
        return JSONResponse(self._status() | {"busy": self._running is not None})

    async def _answer_cancel(self, request: Request) -> Response:
        with self._lock:
            training = self._running is not None and self._running.command["command"] == "train"
            if training:
                self.cancelled.set()
        return JSONResponse({"cancelled": training})

    async def _queue(self, request: Request) -> Response:
        name = request.url.path.removeprefix(PREFIX)
        context = PhaseContext.from_header(request.headers.get(HEADER, ""))
        job = Job(await json_object(request) | {"command": name}, context, asyncio.get_running_loop())
        with self._lock:
            if self._closed:
                raise ApiError(503, "the trainer group is ending and takes no more commands: start a new group")
            self._unfinished += 1
            self._service.touch()
            self._jobs.put(job)
        return StreamingResponse(self._events(job), media_type="application/x-ndjson")

    async def _events(self, job: Job) -> AsyncIterator[str]:
        """The events of a job as lines of JSON, up to the last event."""
        yield _line({"event": "accepted"})
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    event = await job.events.get()
            except TimeoutError:
                if self._beats():
                    yield _line({"event": HEARTBEAT})
                continue
            yield _line(event)
            if event["event"] in LAST_EVENTS:
                return


def _refuse(request: Request, error: Exception) -> Response:
    status, body = describe(error)
    return JSONResponse(body, status)


def _line(event: Message) -> str:
    return json.dumps(event) + "\n"
