"""Request bodies of the platform's API servers: read once, within a limit, and handed on."""

from starlette.types import Message, Receive

from rft_platform.inference.serving.api_errors import ApiError

MAX_BODY_BYTES = 32 << 20  # of a request of the OpenAI API
DRAINED_BYTES = 256 << 20


async def read_body(receive: Receive, limit: int = MAX_BODY_BYTES, drained: int = DRAINED_BYTES) -> bytes:
    """The whole body; raises ApiError (413) for one longer than ``limit`` bytes.

    Of such a body up to ``drained`` bytes are read and dropped, so that its sender reads the answer.
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
        raise ApiError(413, f"the request body is larger than {limit >> 20} MiB", "request_too_large")
    return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body``, then what comes after it: the caller going away."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
