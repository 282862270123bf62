"""Redirect the MLflow links of the Dagster interface to the address of MLflow's interface (``ADDRESS``)."""

import os
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from rft_platform.model_registry.pages import ADDRESS, MLFLOW_PATH
from rft_platform.web_guard.asgi import App, Receive, Scope, Send
from rft_platform.web_guard.checks import LOOPBACK_HOSTS

_NOWHERE = (
    f"no MLflow interface is known here: `rft ui` starts one; elsewhere set {ADDRESS} for the Dagster webserver\n"
)


@dataclass(frozen=True, slots=True)
class MlflowRedirect:
    """ASGI app that redirects ``MLFLOW_PATH`` to MLflow's address; other requests go to the Dagster interface.

    Browsers keep the part of the address after ``#``, which names the page in MLflow.
    """

    app: App

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] != "http" or scope["path"].rstrip("/") != scope.get("root_path", "") + MLFLOW_PATH:
            await self.app(scope, receive, send)
            return
        address, headers = os.environ.get(ADDRESS, ""), dict(scope["headers"])
        if address:
            target = _as_reached(address, headers.get(b"host", b"").decode("latin-1"))
            await _answer(send, 302, "", (b"location", target.encode()))
        else:
            await _answer(send, 404, _NOWHERE)


def _as_reached(address: str, host: str) -> str:
    """``address`` with the loopback name in ``host``, because the browser's cookie is bound to that name."""
    parts, own = urlsplit(address), urlsplit(f"//{host}").hostname
    if parts.hostname in LOOPBACK_HOSTS and own in LOOPBACK_HOSTS:
        name = f"[{own}]" if ":" in str(own) else str(own)
        parts = parts._replace(netloc=name if parts.port is None else f"{name}:{parts.port}")
    return urlunsplit(parts._replace(path=parts.path or "/"))


async def _answer(send: Send, status: int, text: str, *more: tuple[bytes, bytes]) -> None:
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
