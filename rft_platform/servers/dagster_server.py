"""Dagster's webserver behind the web guard: ``python -m rft_platform.servers.dagster_server -w workspace.yaml``.

It takes the options of ``dagster-webserver``. ``dagster-webserver`` serves everybody who reaches its port, executes
GraphQL mutations sent by GET, and has no option for a middleware; this module therefore replaces its application
factory. The server also redirects MLflow links.
"""

import sys
from functools import wraps
from types import ModuleType
from typing import Any

from rft_platform.cluster.local.service_process import end_with_starter
from rft_platform.common.errors import RftError, UserError
from rft_platform.config.home import Home
from rft_platform.servers.mlflow_redirect import MlflowRedirect
from rft_platform.web_guard.asgi import WebGuard
from rft_platform.web_guard.token import access_token

#: Path that returns versions only; used by container health probes.
HEALTH = "/server_info"
_MAKE_APP = "create_app_from_workspace_process_context"


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


if __name__ == "__main__":
    main()
