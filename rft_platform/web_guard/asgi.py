"""ASGI middleware that passes only authorised HTTP requests and WebSockets to an application."""

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from rft_platform.web_guard.checks import (
    Refused,
    bearer_token,
    check_host,
    check_origin,
    configured_hosts,
    tokens_match,
)
from rft_platform.web_guard.sign_in import cookie_is_valid, set_cookie, sign_in_page, take_token

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HOW = (
    "Open the link that the server's command printed (`rft ui`), or send `Authorization: Bearer TOKEN` "
    "with the content of RFT_HOME/web_token."
)
#: Headers of all pages, those of guarded applications included: foreign pages must not frame them.
_HEADERS = ((b"x-frame-options", b"SAMEORIGIN"), (b"x-content-type-options", b"nosniff"))
_PAGE_POLICY = b"default-src 'none'; form-action 'self'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class WebGuard:
    """Wraps ``app``: every request needs an allowed Host, no foreign origin, and the token (header or cookie).

    ``public``: paths that anybody may read by GET, for health checks. ``graphql``: path of a GraphQL endpoint, which
    then accepts only JSON by POST.
    """

    app: App
    token: str
    public: Collection[str] = ()
    graphql: str | None = None
    hosts: frozenset[str] = field(default_factory=configured_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        method = scope.get("method", "WEBSOCKET")
        if method == "GET" and scope["path"] in self.public:
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            signed_in = self._authorise(method, scope, headers)
        except Refused as refusal:
            await _refuse(scope, headers, refusal, send)
            return
        if signed_in is not None:
            await _redirect(signed_in, set_cookie(self.token, scope.get("scheme") == "https"), send)
        else:
            await self.app(scope, receive, _with_headers(send))

    def _authorise(self, method: str, scope: Scope, headers: Mapping[str, str]) -> str | None:
        """Raise Refused, or return the path to redirect to if the token was in the query string, else None."""
        check_host(headers, self.hosts)
        check_origin(method, headers, self.hosts)
        if self.graphql is not None and scope["type"] == "http" and scope["path"].rstrip("/") == self.graphql:
            _check_graphql(method, headers)
        if tokens_match(bearer_token(headers), self.token):
            return None
        token, rest = take_token(scope.get("query_string", b"").decode("latin-1"))
        if method == "GET" and tokens_match(token, self.token):
            return _local_path(scope) + (f"?{rest}" if rest else "")
        if not cookie_is_valid(headers, self.token):
            raise Refused(401, f"an access token is needed. {HOW}")
        return None


def _check_graphql(method: str, headers: Mapping[str, str]) -> None:
    """Accept only JSON by POST, which pages of other origins cannot send without a CORS preflight request."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and media_type != "application/json":
        raise Refused(415, "GraphQL requests need the content type application/json")
    if method != "POST" and "text/html" not in headers.get("accept", ""):  # the editor's page executes no query
        raise Refused(405, "GraphQL requests are sent by POST")


def _local_path(scope: Scope) -> str:
    """The path of the request, in a form that cannot be read as an address of another host."""
    return "/" + quote(scope["path"].lstrip("/\\"))


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            names = {name.lower() for name, _ in headers}
            message["headers"] = [*headers, *(pair for pair in _HEADERS if pair[0] not in names)]
        await send(message)

    return sending


async def _refuse(scope: Scope, headers: Mapping[str, str], refusal: Refused, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": str(refusal)[:100]})
    elif refusal.status == 401 and "text/html" in headers.get("accept", ""):
        page = sign_in_page(_local_path(scope), HOW)
        await _answer(401, b"text/html; charset=utf-8", page, send, (b"content-security-policy", _PAGE_POLICY))
    else:
        text = json.dumps({"error": str(refusal)})
        await _answer(refusal.status, b"application/json", text, send)


async def _redirect(location: str, cookie: str, send: Send) -> None:
    more = ((b"location", location.encode()), (b"set-cookie", cookie.encode()), (b"referrer-policy", b"no-referrer"))
    await _answer(303, b"text/plain; charset=utf-8", "", send, *more)


async def _answer(status: int, content_type: bytes, text: str, send: Send, *more: tuple[bytes, bytes]) -> None:
    body = text.encode()
    headers = [
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *((b"www-authenticate", b"Bearer") for _ in range(status == 401)),
        *_HEADERS,
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
