"""Dagster's webserver behind the web guard: ``python -m rft_platform.servers.dagster_server -w workspace.yaml``.

It takes the options of ``dagster-webserver``. ``dagster-webserver`` serves everybody who reaches its port, executes
GraphQL mutations sent by GET, and has no option for a middleware; this module therefore replaces its application
factory. The server also redirects the MLflow links of the interface to the address of MLflow's interface (``ADDRESS``).
"""

import os
import sys
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rft_platform.cluster.local.service_process import end_with_starter
from rft_platform.common.errors import RftError, UserError
from rft_platform.config.home import Home
from rft_platform.model_registry.pages import ADDRESS, MLFLOW_PATH
from rft_platform.web_guard.asgi import WebGuard
from rft_platform.web_guard.checks import LOOPBACK_HOSTS
from rft_platform.web_guard.token import access_token

#: Path that returns versions only; used by container health probes.
HEALTH = "/server_info"
_MAKE_APP = "create_app_from_workspace_process_context"
_NOWHERE = (
    f"no MLflow interface is known here: `rft ui` starts one; elsewhere set {ADDRESS} for the Dagster webserver\n"
)


def main() -> None:
    """Serve until interrupted; exit code 2 for an invalid token."""
    end_with_starter()
    from dagster_webserver import cli

    try:
        guard_application(cli, access_token(Home.from_environment().web_token))
    except RftError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None
    cli.main()


def guard_application(cli: ModuleType, token: str) -> None:
    """Make ``dagster_webserver.cli`` serve a guarded application.

    Raises RftError if this version of Dagster lacks the replaced function, so that nothing is served unguarded.
    """
    make_app = getattr(cli, _MAKE_APP, None)
    if make_app is None:
        raise RftError(
            f"dagster_webserver.cli has no {_MAKE_APP}: this version of dagster-webserver is not supported; install "
            "the pinned version"
        )

    @wraps(make_app)
    def make_guarded_app(context: Any, path_prefix: str = "", *arguments: Any, **options: Any) -> WebGuard:
        app = make_app(context, path_prefix, *arguments, **options)
        app = MlflowRedirect(app)
        return WebGuard(app, token, public={f"{path_prefix}{HEALTH}"}, graphql=f"{path_prefix}/graphql")

    setattr(cli, _MAKE_APP, make_guarded_app)


@dataclass(frozen=True, slots=True)
class MlflowRedirect:
    """ASGI app that redirects ``MLFLOW_PATH`` to MLflow's address; other requests go to the Dagster interface.

    Browsers keep the part of the address after ``#``, which names the page in MLflow.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI call."""
        if scope["type"] != "http" or scope["path"].rstrip("/") != scope.get("root_path", "") + MLFLOW_PATH:
            await self.app(scope, receive, send)
            return
        answer: Response = PlainTextResponse(_NOWHERE, 404)
        if address := os.environ.get(ADDRESS):
            answer = RedirectResponse(_as_reached(address, Headers(scope=scope).get("host", "")), 302)
        await answer(scope, receive, send)


def _as_reached(address: str, host: str) -> str:
    """``address`` with the loopback name in ``host``, because the browser's cookie is bound to that name."""
    parts, own = urlsplit(address), urlsplit(f"//{host}").hostname
    if parts.hostname in LOOPBACK_HOSTS and own in LOOPBACK_HOSTS:
        name = f"[{own}]" if ":" in str(own) else str(own)
        parts = parts._replace(netloc=name if parts.port is None else f"{name}:{parts.port}")
    return urlunsplit(parts._replace(path=parts.path or "/"))


if __name__ == "__main__":
    main()
