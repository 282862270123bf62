"""Sign-in of a browser: the link with the token, the cookie that replaces the token, and the page that asks for it."""

import hashlib
import hmac
from collections.abc import Mapping
from html import escape
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from rft_platform.web_guard.checks import tokens_match

TOKEN_PARAMETER = "token"


def sign_in_url(url: str, token: str, page: str = "/") -> str:
    """The address to open in a browser: ``page`` of the server ``url``, with the token as a query parameter."""
    return f"{url}{page}?{urlencode({TOKEN_PARAMETER: token})}"


def cookie_is_valid(headers: Mapping[str, str], token: str) -> bool:
    """Whether the request has the cookie that belongs to ``token``."""
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(token))
    except CookieError:
        return False
    return morsel is not None and tokens_match(morsel.value, _cookie_value(token))


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
