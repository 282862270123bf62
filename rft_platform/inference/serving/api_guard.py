"""Access control and error containment for the platform's API servers: the engines and the recording gateway.

Loopback is no trust boundary: every local user, and every web page in a local browser, can reach a loopback port.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rft_platform.common import json_codec
from rft_platform.inference.http_contract import api_key_of
from rft_platform.inference.serving.request_body import read_body, replayed
from rft_platform.openai_api.errors import ApiError, describe
from rft_platform.web_guard.checks import (
    Refused,
    bearer_token,
    check_host,
    check_origin,
    configured_hosts,
    headers_of,
    tokens_match,
)

LOG = logging.getLogger(__name__)
PUBLIC_PATHS = ("/health", "/ping")
CONTROL_PREFIX = "/engine/"
MAX_CONTROL_BYTES = 1 << 30  # large, for batches of token ids; only callers with the control token may send so much
_STRANGERS_BYTES = 1 << 20  # read and drop at most this much of a refused body, so that the caller reads the response
_LINGER_S = 2.0  # for this long


class ApiGuard:
    """ASGI middleware of engines and trainer: requires a key except for health checks, and limits body sizes.

    Paths below ``control_prefix`` require ``token`` itself. Other paths accept ``api_key_of(token)`` or ``token``.
    """

    def __init__(self, app: ASGIApp, token: str, control_prefix: str = CONTROL_PREFIX) -> None:
        self._app = contained(app)
        self._control_prefix = control_prefix
        self._token = token
        self._api_key = api_key_of(token)
        self._hosts = configured_hosts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "not served"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        control = scope["path"].startswith(self._control_prefix)
        try:
            headers = headers_of(scope)
            check_caller(scope["method"], headers, self._hosts)
            if scope["path"] not in PUBLIC_PATHS or scope["method"] not in ("GET", "HEAD"):
                self._check_key(bearer_token(headers), control)
        except ApiError as error:
            await refuse_stranger(error, receive, send)
            return
        try:
            body = await (read_body(receive, MAX_CONTROL_BYTES) if control else read_body(receive))
        except ApiError as error:
            await send_error(error, send)
            return
        await self._app(scope, replayed(body, receive), send)

    def _check_key(self, key: str | None, control: bool) -> None:
        if tokens_match(key, self._token) or (not control and tokens_match(key, self._api_key)):
            return
        if control:
            raise ApiError(401, "the control plane requires the bearer token of the lease", "invalid_api_key")
        raise ApiError(
            401,
            "this engine requires its API key (`Authorization: Bearer KEY`). A workflow's clients send it; an agent "
            "with its own client calls the recording gateway (model.base_url, model.api_key)",
            "invalid_api_key",
        )


def check_caller(method: str, headers: Mapping[str, str], hosts: frozenset[str]) -> None:
    """Raise ApiError for a foreign Host header, or for a browser request on behalf of another origin."""
    try:
        check_host(headers, hosts)
        check_origin(method, headers, hosts)
    except Refused as refusal:
        raise ApiError(refusal.status, str(refusal), "forbidden") from refusal


async def refuse_stranger(error: Exception, receive: Receive, send: Send) -> None:
    """Send ``error`` at once, then close the connection.

    Before it is closed, at most ``_STRANGERS_BYTES`` of the body are read for at most ``_LINGER_S`` seconds. A
    connection that is closed while its client still sends is reset, and the client may lose the response.
    """
    await send_error(error, send, close=True, more_body=True)
    with suppress(ApiError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await read_body(receive, _STRANGERS_BYTES, _STRANGERS_BYTES)
    await send({"type": "http.response.body", "body": b""})


async def send_error(error: Exception, send: Send, close: bool = False, more_body: bool = False) -> None:
    """Send ``error`` as a complete response in OpenAI's form; ``more_body``: an empty part of the body will follow."""
    status, body = describe(error)
    content = json_codec.dump(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    retry_after_s = getattr(error, "retry_after_s", None)
    headers += [(b"retry-after", str(retry_after_s).encode())] if retry_after_s is not None else []
    headers += [(b"connection", b"close")] if close or status == 413 else []  # the rest of a large body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": more_body})


def contained(app: ASGIApp) -> ASGIApp:
    """Wrap ``app`` so that unexpected exceptions become an error response and the connection stays usable.

    A server that catches an exception of the application closes the connection, even if the response has been sent. The
    caller's next request on that connection would be lost.
    """

    async def containing(scope: Scope, receive: Receive, send: Send) -> None:
        begun = ended = False

        async def watched(message: Message) -> None:
            nonlocal begun, ended
            begun = True
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http" or (begun and not ended):
                raise
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not begun:
                await send_error(error, send)

    return containing
