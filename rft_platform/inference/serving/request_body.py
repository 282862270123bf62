"""Read request bodies of the platform's API servers once, within a limit, and replay them to the application."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from rft_platform.common import json_codec
from rft_platform.openai_api.errors import ApiError

if TYPE_CHECKING:
    from fastapi.routing import APIRoute

MAX_BODY_BYTES = 32 << 20  # limit for requests of the OpenAI API
DRAINED_BYTES = 64 << 20
#: Values of a JSON body. The parser holds the interpreter lock, so the time of one body must be short in any thread:
#: 200,000 values take some 50 ms, and a text of 4 MiB takes 10 ms.
MOST_VALUES = 200_000
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


async def read_body(receive: Receive, limit: int = MAX_BODY_BYTES, drained: int = DRAINED_BYTES) -> bytes:
    """Read the whole body; raises ApiError (413) if it is longer than ``limit`` bytes.

    Up to ``drained`` bytes of a too long body are read and dropped, so that the sender reads the response.
    """
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > drained:
            break
        else:
            parts.clear()
        more = message["type"] == "http.request" and message.get("more_body", False)
    if size > limit:
        size_limit = f"{limit / (1 << 20):g} MiB" if limit >= 1 << 20 else f"{limit:,} bytes"
        raise ApiError(413, f"the request body is larger than {size_limit}", "request_too_large")
    return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that returns ``body`` first, then the messages that follow it, such as a disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def parse_body(body: bytes, most_values: int = MOST_VALUES) -> Any:
    """Parse a JSON body. Raises ApiError (400) for other bodies, and for those with more than ``most_values`` values.

    A large body is parsed in another thread.
    """
    if len(body) > json_codec.LARGE_BYTES:
        return await asyncio.to_thread(_parse, body, most_values)
    return _parse(body, most_values)


def _parse(body: bytes, most_values: int) -> Any:
    if body.count(b",") > most_values and _TEXT.sub(b"", body).count(b",") > most_values:
        raise ApiError(400, f"the body has more than {most_values:,} values: send several requests", "too_many_values")
    try:
        return json_codec.parse(body)
    except ValueError as error:
        raise ApiError(400, f"the body must be JSON: {error}", "invalid_value") from error


class _ParsedRequest(Request):
    """A request whose body has been parsed; FastAPI calls ``json``."""

    value: Any = None

    async def json(self) -> Any:
        return self.value


def parsing_route(most_values: int) -> "type[APIRoute]":
    """A FastAPI route whose JSON body ``parse_body`` parses; an empty body is None."""
    from fastapi.routing import APIRoute  # imported here, because the environment of an agent may lack it

    class ParsingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def parse_and_handle(request: Request) -> Response:
                parsed = _ParsedRequest(request.scope, request.receive)
                body = await parsed.body()
                parsed.value = await parse_body(body, most_values) if body else None
                return await handle(parsed)

            return parse_and_handle

    return ParsingRoute


async def json_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object; {} for an empty body. Raises ApiError (400) for any other body."""
    try:
        return json_codec.parse_object(await request.body() or b"{}")
    except ValueError as error:
        raise ApiError(400, f"{request.url.path}: the body must be a JSON object: {error}", "invalid_value") from error
