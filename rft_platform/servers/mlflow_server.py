"""MLflow's tracking server behind the web guard, in one process.

Start: ``python -m rft_platform.servers.mlflow_server --port 5000 --artifact-root FOLDER``, with the database's URL in
``MLFLOW_BACKEND_STORE_URI``. The command ``mlflow server`` is not used: it checks Host and Origin, but every local user
can read and change everything, and it accepts another application only from an installed plugin.
"""

import argparse
import os
import sys
import uuid
from typing import Any

from rft_platform.cluster.local.service_process import end_with_starter
from rft_platform.common.database_urls import with_time_limits
from rft_platform.common.errors import RftError, UserError
from rft_platform.config.home import Home
from rft_platform.model_registry.pages import WORKFLOW
from rft_platform.servers.ports import MLFLOW_PORT
from rft_platform.web_guard.asgi import WebGuard
from rft_platform.web_guard.token import access_token

HEALTH = "/health"
#: MLflow opens the part of its interface for traces until a user chooses the one for training. Only the browser stores
#: this choice, so the page sets it at the first visit.
_OPEN_RUNS = f"""<script>
if (!localStorage.getItem("mlflow.workflowType_v1")) localStorage.setItem("mlflow.workflowType_v1", '"{WORKFLOW}"')
</script>""".encode()
BACKEND = "MLFLOW_BACKEND_STORE_URI"


def main() -> None:
    """Serve until interrupted; exit code 2 for bad options."""
    end_with_starter()
    options = options_parser().parse_args()
    try:
        app = guarded_application(options, access_token(Home.from_environment().web_token))
    except RftError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None
    import uvicorn

    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", access_log=False)


def guarded_application(options: argparse.Namespace, token: str) -> WebGuard:
    """MLflow's application behind the guard, configured as ``mlflow server`` configures its workers."""
    backend = os.environ.get(BACKEND)
    if not backend:
        raise UserError(f"{BACKEND} is not set: set it to the database's URL, such as sqlite:////srv/mlflow.db")
    backend = with_time_limits(backend)
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    root = options.artifact_root or "mlflow-artifacts:/"
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: backend,
        constants.REGISTRY_STORE_URI_ENV_VAR: backend,
        constants.ARTIFACT_ROOT_ENV_VAR: root,
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
        "_MLFLOW_SERVER_BOOT_ID": uuid.uuid4().hex,
        "_MLFLOW_IN_JOB_EXECUTOR": "false",  # the server must never load stored code
        "MLFLOW_SERVER_ALLOWED_HOSTS": "*",  # the guard checks the Host against the platform's list
    }
    if options.artifacts_destination:
        os.environ[constants.ARTIFACTS_DESTINATION_ENV_VAR] = options.artifacts_destination
    initialize_backend_stores(backend, backend, root)
    from mlflow.server import app as pages
    from mlflow.server.fastapi_app import app  # reads the environment at import

    pages.after_request(_open_runs)
    return WebGuard(app, token, public={HEALTH})


def _open_runs(response: Any) -> Any:
    """Make MLflow's page open the part with runs, charts and models, unless the browser's user has chosen another.

    ``response`` is one of Flask, by which MLflow serves its page.
    """
    if response.mimetype == "text/html":
        response.direct_passthrough = False
        response.set_data(response.get_data().replace(b"<head>", b"<head>" + _OPEN_RUNS, 1))
    return response


def options_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m rft_platform.servers.mlflow_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=MLFLOW_PORT, help="port to listen on")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--artifact-root", help="folder or URL that clients write artifacts to themselves")
    where.add_argument("--artifacts-destination", help="folder or URL that the server keeps uploaded artifacts in")
    return parser


if __name__ == "__main__":
    main()
