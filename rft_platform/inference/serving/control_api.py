"""The control and token routes below /engine. Only callers with the token of the lease may use them.

A batch is JSON with one list per field. No validation models are used, because a call carries thousands of sequences.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from rft_platform.common import json_codec
from rft_platform.common.errors import UserError
from rft_platform.inference.interface import (
    VERSION_HEADER,
    EngineStatus,
    Generation,
    PartialBatch,
    PauseMode,
    SamplingParams,
)
from rft_platform.inference.serving.request_body import json_object
from rft_platform.inference.serving.weight_files import is_adapter
from rft_platform.object_store.weights import fetch_weights, lacks_weights, served_weights
from rft_platform.openai_api.errors import ApiError

PAUSE_MODES = ("keep", "abort", "wait")
ROUTES = (
    "status",
    "metrics",
    "render",
    "generate",
    "decode",
    "score",
    "fetch_weights",
    "update_weights",
    "pause",
    "resume",
    "sleep",
    "shutdown",
)
Handler = Callable[[dict[str, Any], HttpRequest], Awaitable[Response]]
T = TypeVar("T")


class ServedEngine(Protocol):
    """The methods of an engine that the control routes call in the engine's server process."""

    def status(self) -> EngineStatus:
        """Identity and state."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counters since the start."""
        ...

    async def render(self, conversations: list[list[dict[str, Any]]], tools: list[Any] | None) -> list[list[int]]:
        """Prompt ids of each conversation."""
        ...

    async def generate(
        self, prompts: list[list[int]], sampling: SamplingParams, partial: PartialBatch | None = None
    ) -> tuple[int, list[Generation]]:
        """(policy version, generations); cancelled when the caller disconnects."""
        ...

    async def decode(self, sequences: list[list[int]]) -> list[str]:
        """Text of each sequence."""
        ...

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token."""
        ...

    async def update_weights(self, folder: Path, policy_version: int) -> None:
        """Serve other weights; if they do not fit, keep the old ones and raise WeightMismatchError."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests; returns once running requests are frozen, ended or finished."""
        ...

    async def resume(self) -> None:
        """Serve again."""
        ...

    async def sleep(self) -> None:
        """Free the GPU's memory until the next request."""
        ...


def install(app: FastAPI, engine: ServedEngine, stop: Callable[[], None]) -> None:
    """Add the routes to ``app``, which ``ApiGuard`` must wrap; ``stop`` ends the server."""
    control_plane = ControlPlane(engine, stop)
    router = APIRouter(prefix="/engine")
    for name in ROUTES:
        router.add_api_route(
            f"/{name}", _route(getattr(control_plane, name)), methods=["POST"], include_in_schema=False
        )
    app.include_router(router)


def _route(handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def route(http: HttpRequest) -> Response:
        body = await json_object(http)
        try:
            return await handler(body, http)
        except (KeyError, TypeError) as error:
            raise ApiError(400, f"{http.url.path}: the body is invalid: {error!r}", "invalid_value") from error

    return route


def _sampling(options: dict[str, Any]) -> SamplingParams:
    """The sampling parameters of a batch; UserError for values that no engine can sample with."""
    sampling = SamplingParams(**{**options, "stop": tuple(options.get("stop") or ())})
    for name, least in (("max_tokens", 1), ("n", 1), ("top_k", -1), ("first_prompt", 0)):
        if type(value := getattr(sampling, name)) is not int or value < least:
            raise UserError(f"sampling.{name} {value!r}: expected a whole number of at least {least}")
    if not (0 < sampling.top_p <= 1 and 0 <= sampling.temperature < math.inf):
        raise UserError(
            f"sampling: expected 0 < top_p <= 1 and temperature >= 0, got top_p {sampling.top_p} and temperature "
            f"{sampling.temperature}"
        )
    if sampling.seed is not None and type(sampling.seed) is not int:
        raise UserError(f"sampling.seed {sampling.seed!r}: expected a whole number or null")
    return sampling


class ControlPlane:
    """The handlers, one method per route."""

    def __init__(self, engine: ServedEngine, stop: Callable[[], None]) -> None:
        self.engine = engine
        self.stop = stop
        # Locked files of the fetched folders in use, so that they are not deleted.
        self._locks: dict[Literal["fetched", "full", "adapter"], IO[str]] = {}

    async def status(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """``EngineStatus`` as JSON."""
        return JSONResponse(asdict(self.engine.status()))

    async def metrics(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """Counters since the start."""
        return JSONResponse(self.engine.metrics())

    async def render(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{conversations, tools} -> {ids}"""
        return JSONResponse({"ids": await self.engine.render(body["conversations"], body.get("tools"))})

    async def generate(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{prompts, sampling, partial} -> {policy_version, token_ids, logprobs, finish_reasons}.

        The last three are lists by prompt and choice.
        """
        sampling = _sampling(body["sampling"])
        partial = PartialBatch(**body["partial"]) if body.get("partial") else None
        version, generations = self.engine.status().policy_version, list[Generation]()
        if body["prompts"]:
            version, generations = await while_connected(self.engine.generate(body["prompts"], sampling, partial), http)
        columns = {
            "policy_version": version,
            "token_ids": [[done.token_ids for done in each.completions] for each in generations],
            "logprobs": [[done.logprobs for done in each.completions] for each in generations],
            "finish_reasons": [[done.finish_reason for done in each.completions] for each in generations],
        }
        return _columns(columns, headers={VERSION_HEADER: str(version)})

    async def decode(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{sequences} -> {texts}"""
        return _columns({"texts": await self.engine.decode(body["sequences"])})

    async def score(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{sequences} -> {logprobs}"""
        return _columns({"logprobs": await self.engine.score(body["sequences"])})

    async def fetch_weights(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{folder, stored} -> {here}: whether this machine has the folder; with ``stored`` it fetches it."""
        folder, stored = Path(body["folder"]), body.get("stored")
        if stored is not None:
            self._keep("fetched", None)  # weights that were fetched before and never served
            self._keep("fetched", await asyncio.to_thread(fetch_weights, folder, stored))
        return JSONResponse({"here": stored is not None or not lacks_weights(folder)})

    async def update_weights(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{folder, policy_version} -> status, after the new weights are active."""
        folder = Path(body["folder"])
        await self.engine.update_weights(folder, int(body["policy_version"]))
        # The full weights below an adapter are served, too.
        self._keep("adapter" if is_adapter(folder) else "full", served_weights(folder))
        self._keep("fetched", None)
        return JSONResponse(asdict(self.engine.status()))

    def _keep(self, kind: Literal["fetched", "full", "adapter"], weights: IO[str] | None) -> None:
        if before := self._locks.pop(kind, None):
            before.close()
        if weights is not None:
            self._locks[kind] = weights

    async def pause(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{mode} -> {paused}, once running requests are frozen, ended or finished."""
        mode = body.get("mode", "wait")
        if mode not in PAUSE_MODES:
            raise UserError(f"pause mode {mode!r}: expected one of {', '.join(PAUSE_MODES)}")
        await self.engine.pause(mode)
        return JSONResponse({"paused": True})

    async def resume(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """Serve again."""
        await self.engine.resume()
        return JSONResponse({"paused": False})

    async def sleep(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """Free the GPU's memory until the next request."""
        await self.engine.sleep()
        return JSONResponse({"sleeps": True})

    async def shutdown(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """End the server."""
        self.stop()
        return JSONResponse({"stopping": True})


def _columns(values: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """A JSON response, encoded by a fast codec, because it can hold millions of numbers."""
    return Response(json_codec.dump(values), media_type="application/json", headers=headers)


async def while_connected(work: Coroutine[Any, Any, T], http: HttpRequest) -> T:
    """The result of ``work``, which is cancelled when the caller disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        return await task
    finally:
        gone.cancel()


async def disconnected(http: HttpRequest) -> None:
    """Return when the caller has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
