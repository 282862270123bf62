"""FastAPI routes whose bodies are parsed by ``json_codec``: bounded nesting, valid characters, no NaN."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from rft_platform.inference.serving import json_codec

LARGE_BYTES = 1 << 18  # a larger body is parsed in a thread


class JsonRequest(Request):
    """A request whose body is strict JSON."""

    async def json(self) -> Any:
        """The parsed body; raises JSONDecodeError, which becomes a 400, if it is not JSON."""
        body = await self.body()
        try:
            if len(body) > LARGE_BYTES:
                return await asyncio.to_thread(json_codec.parse, body)
            return json_codec.parse(body)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class JsonRoute(APIRoute):
    """A route that receives ``JsonRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, called with a ``JsonRequest``."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
