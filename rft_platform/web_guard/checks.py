"""Framework-neutral checks of one HTTP request: its Host, its origin, its access token.

Loopback is no trust boundary: every local user, and every web page in a local browser, can reach a loopback port.
Headers are mappings with lower-case names.
"""

import hmac
import os
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from rft_platform.cluster.interface import HOSTS_VARIABLE

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Refused(Exception):
    """The request is refused; ``status`` is the HTTP status of the response, and the exception's text is the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def configured_hosts() -> frozenset[str]:
    """Host names that requests may use besides the loopback names: the comma-separated variable ``RFT_WEB_HOSTS``."""
    names = os.environ.get(HOSTS_VARIABLE, "").split(",")
    return frozenset(name.strip().lower() for name in names if name.strip())


def check_host(headers: Mapping[str, str], hosts: Collection[str] = ()) -> None:
    """Raise Refused (403) unless the Host header names a loopback address or one of ``hosts``, with any port.

    This stops DNS rebinding: a foreign page whose host name resolves to a loopback address sends its own name as Host.
    """
    name, _ = _host_and_port(headers.get("host", ""))
    if name not in LOOPBACK_HOSTS and name not in hosts:
        raise Refused(
            403,
            f"the Host {name[:100]!r} is not served: use 127.0.0.1 or localhost, or add the name to {HOSTS_VARIABLE}",
        )


def check_origin(method: str, headers: Mapping[str, str], hosts: Collection[str] = ()) -> None:
    """Raise Refused (403) for a request that a browser makes on behalf of another origin.

    Following a link to the server (a top-level GET) is allowed. Clients other than browsers send neither Origin nor
    Sec-Fetch-Site, so they pass.
    """
    site = headers.get("sec-fetch-site", "none")
    follows_link = (
        method in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
    if site not in ("none", "same-origin") and not follows_link:
        raise Refused(403, f"{site} requests are refused: open the page of this server itself")
    origin = headers.get("origin")
    if origin is not None and not _is_own(origin, headers.get("host", ""), hosts):
        raise Refused(403, f"requests from the origin {origin[:100]!r} are refused")


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """The headers of a request in ASGI's form, by lower-case name; a value that is not UTF-8 is read as Latin-1."""
    return {name.decode("latin-1"): _text(value) for name, value in scope["headers"]}


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def bearer_token(headers: Mapping[str, str]) -> str | None:
    """The token of ``Authorization: Bearer TOKEN``; None if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def tokens_match(token: str | None, expected: str) -> bool:
    """Compare in constant time; a missing or empty token never matches."""
    return bool(token and expected) and hmac.compare_digest(str(token).encode(), expected.encode())


def _is_own(origin: str, host: str, hosts: Collection[str]) -> bool:
    try:
        parts = urlsplit(origin)
        name, port = parts.hostname, parts.port
    except ValueError:
        return False
    if parts.scheme not in _DEFAULT_PORTS or name is None:
        return False  # also for "null", the origin of a sandboxed frame or a local file
    default = _DEFAULT_PORTS[parts.scheme]
    own_name, own_port = _host_and_port(host)
    return name in hosts or (name == own_name and (port or default) == (own_port or default))


def _host_and_port(host: str) -> tuple[str, int | None]:
    """Name and port of a Host header; an empty name if it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        if parts.netloc != host or parts.username is not None:
            return "", None
        return parts.hostname or "", parts.port
    except ValueError:
        return "", None
