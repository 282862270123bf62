"""The control plane and the token plane, below /engine: for the holder of the lease's token only.

Batches travel as columns of plain JSON, without validation models: thousands of sequences a call.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from rft_platform.errors import UserError
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.transformers_engine.api_errors import ApiError
from rft_platform.inference.transformers_engine.engine import TransformersEngine
from rft_platform.inference.transformers_engine.openai_api import finished, version_header

PAUSE_MODES = ("keep", "abort", "wait")
Handler = Callable[[dict[str, Any], HttpRequest], Awaitable[Response]]


def install(app: FastAPI, engine: TransformersEngine, token: str, stop: Callable[[], None]) -> None:
    """Add the routes; ``stop`` ends the server."""
    planes = ControlPlane(engine, stop)
    router = APIRouter(prefix="/engine")
    for name in (
        "status",
        "metrics",
        "render",
        "generate",
        "decode",
        "score",
        "update_weights",
        "pause",
        "resume",
        "shutdown",
    ):
        router.add_api_route(f"/{name}", _guarded(getattr(planes, name), token), methods=["POST"])
    app.include_router(router)


def _guarded(handler: Handler, token: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def route(http: HttpRequest) -> Response:
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), token.encode()):
            raise ApiError(401, "the control plane needs the bearer token of the engine's lease", "invalid_api_key")
        body = json.loads(await http.body() or b"{}")
        try:
            return await handler(body, http)
        except (KeyError, TypeError) as error:
            raise ApiError(400, f"{http.url.path}: the body does not fit: {error!r}", "invalid_value") from error

    return route


class ControlPlane:
    """One method a route."""

    def __init__(self, engine: TransformersEngine, stop: Callable[[], None]) -> None:
        self.engine = engine
        self.stop = stop

    async def status(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """``EngineStatus`` as JSON."""
        return JSONResponse(asdict(self.engine.status()))

    async def metrics(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """Counters since the start."""
        return JSONResponse(self.engine.metrics())

    async def render(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{conversations, tools} -> {ids}"""
        render = self.engine.template.render
        return JSONResponse({"ids": await asyncio.to_thread(render, body["conversations"], body.get("tools"))})

    async def generate(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{prompts, sampling} -> {policy_version, token_ids, logprobs, finish_reasons}, lists by prompt and choice."""
        options = body["sampling"]
        sampling = SamplingParams(**{**options, "stop": tuple(options.get("stop") or ())})
        request = self.engine.submit(body["prompts"], sampling)
        await finished(self.engine, request, http)
        generations = request.future.result()
        columns = {
            "policy_version": request.policy_version,
            "token_ids": [[done.token_ids for done in each.completions] for each in generations],
            "logprobs": [[done.logprobs for done in each.completions] for each in generations],
            "finish_reasons": [[done.finish_reason for done in each.completions] for each in generations],
        }
        return JSONResponse(columns, headers=version_header(request))

    async def decode(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{sequences} -> {texts}"""
        return JSONResponse({"texts": await asyncio.to_thread(self.engine.tokenizer.decode_many, body["sequences"])})

    async def score(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{sequences} -> {logprobs}"""
        return JSONResponse({"logprobs": await asyncio.to_thread(self.engine.score, body["sequences"])})

    async def update_weights(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{folder, policy_version} -> status, once the new weights are served."""
        await asyncio.to_thread(self.engine.update_weights, Path(body["folder"]), int(body["policy_version"]))
        return JSONResponse(asdict(self.engine.status()))

    async def pause(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """{mode} -> {paused}, once what was running is frozen, ended or finished."""
        mode = body.get("mode", "wait")
        if mode not in PAUSE_MODES:
            raise UserError(f"pause mode {mode!r}: expected one of {', '.join(PAUSE_MODES)}")
        await asyncio.wrap_future(self.engine.scheduler.pause(mode))
        return JSONResponse({"paused": True})

    async def resume(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """Serve again."""
        self.engine.scheduler.resume()
        return JSONResponse({"paused": False})

    async def shutdown(self, body: dict[str, Any], http: HttpRequest) -> Response:
        """End the server."""
        self.stop()
        return JSONResponse({"stopping": True})
