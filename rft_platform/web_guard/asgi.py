"""ASGI middleware that passes only authorised HTTP requests and WebSockets to an application.

A browser signs in by a link with the token, which a cookie replaces.
"""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from html import escape
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rft_platform.web_guard.checks import (
    Refused,
    bearer_token,
    check_host,
    check_origin,
    configured_hosts,
    headers_of,
    tokens_match,
)

TOKEN_PARAMETER = "token"  #: of a query string
HOW = (
    "Open the link that the server's command printed (`rft ui`), or send `Authorization: Bearer TOKEN` "
    "with the value of RFT_WEB_TOKEN or the content of RFT_HOME/web_token."
)
#: Headers of all pages, those of guarded applications included: foreign pages must not frame them.
_HEADERS = {"x-frame-options": "SAMEORIGIN", "x-content-type-options": "nosniff"}
_PAGE_POLICY = "default-src 'none'; form-action 'self'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class WebGuard:
    """Wraps ``app``: every request needs an allowed Host, no foreign origin, and the token (header or cookie).

    ``public``: paths that anybody may read by GET, for health checks. ``graphql``: path of a GraphQL endpoint, which
    then accepts only JSON by POST.
    """

    app: ASGIApp
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
        headers = headers_of(scope)
        try:
            signed_in = self._authorise(method, scope, headers)
        except Refused as refusal:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": str(refusal)[:100]})
            else:
                await _refusal(scope, headers, refusal)(scope, receive, _with_headers(send))
            return
        if signed_in is None:
            await self.app(scope, receive, _with_headers(send))
            return
        cookie = set_cookie(self.token, scope.get("scheme") == "https")
        sent = {"cache-control": "no-store", "referrer-policy": "no-referrer", "set-cookie": cookie}
        await RedirectResponse(signed_in, 303, sent)(scope, receive, _with_headers(send))

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
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


def _refusal(scope: Scope, headers: Mapping[str, str], refusal: Refused) -> Response:
    sent = {"cache-control": "no-store"} | ({"www-authenticate": "Bearer"} if refusal.status == 401 else {})
    if refusal.status == 401 and "text/html" in headers.get("accept", ""):
        page = sign_in_page(_local_path(scope), HOW)
        return HTMLResponse(page, 401, {**sent, "content-security-policy": _PAGE_POLICY})
    return JSONResponse({"error": str(refusal)}, refusal.status, sent)


def sign_in_url(url: str, token: str, page: str = "/") -> str:
    """The address to open in a browser: ``page`` of the server ``url``, with the token as a query parameter."""
    return f"{url}{page}?{urlencode({TOKEN_PARAMETER: token})}"


def without_token(url: str) -> str:
    """A link of ``sign_in_url`` without its token; other addresses unchanged."""
    parts = urlsplit(url)
    token, rest = take_token(parts.query)
    return url if token is None else urlunsplit(parts._replace(query=rest))


def cookie_is_valid(headers: Mapping[str, str], token: str) -> bool:
    """Whether the request has the cookie that belongs to ``token``."""
    # Other servers of the host set cookies too, and not all are well-formed: those must not hide this one.
    pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
    values = [value for name, _, value in pairs if name == _cookie_name(token)]
    return any(tokens_match(value, _cookie_value(token)) for value in values)


def set_cookie(token: str, secure: bool) -> str:
    """The ``Set-Cookie`` header. Scripts cannot read the cookie; browsers do not send it with cross-site requests."""
    attributes = ["Path=/", "HttpOnly", "SameSite=Strict", *(["Secure"] if secure else [])]
    return "; ".join([f"{_cookie_name(token)}={_cookie_value(token)}", *attributes])


def take_token(query: str) -> tuple[str | None, str]:
    """The token parameter of a query string, and the query string without it."""
    pairs = parse_qsl(query, keep_blank_values=True)
    tokens = [value for name, value in pairs if name == TOKEN_PARAMETER]
    rest = urlencode([(name, value) for name, value in pairs if name != TOKEN_PARAMETER])
    return (tokens[-1] if tokens else None), rest


def sign_in_page(path: str, what: str) -> str:
    """HTML for a browser without a valid cookie, with a form for the token.

    A signed-in browser that follows a link from another site does not send the cookie either. The page's "Continue"
    link repeats the request from this site, with the cookie.
    """
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Access token needed</title>"
        f"<h1>Access token needed</h1><p>{escape(what)}</p>"
        f'<p>Signed in already, and following a link? <a href="{escape(path)}">Continue</a></p>'
        f'<form method=get action="{escape(path)}"><label>Access token '
        f"<input type=password name={TOKEN_PARAMETER} autocomplete=off required></label> <button>Open</button></form>"
    )


def _cookie_name(token: str) -> str:
    """The cookie's name: equal for all servers of a project, because browsers send a cookie to every port of a host."""
    return f"rft_web_{hashlib.sha256(token.encode()).hexdigest()[:12]}"


def _cookie_value(token: str) -> str:
    return hmac.new(token.encode(), b"cookie of the platform's web servers", hashlib.sha256).hexdigest()
