"""What the guarded servers rely on in Dagster and MLflow: a version that changed it is noticed here."""

import types
import warnings
from pathlib import Path

import pytest

from rft_platform.common.errors import RftError, UserError
from rft_platform.model_registry.pages import WORKFLOW
from rft_platform.servers import dagster_server, mlflow_server
from rft_platform.servers.ui_servers import serves_guarded
from rft_platform.web_guard.asgi import WebGuard


@pytest.mark.slow
def test_dagsters_command_serves_what_the_replaced_function_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster_webserver import cli

    served: list[object] = []
    monkeypatch.setattr(cli, "create_app_from_workspace_process_context", lambda *_, **__: "the application")
    monkeypatch.setattr(cli.uvicorn, "run", lambda app, **_: served.append(app))
    monkeypatch.setattr(cli.check, "inst_param", lambda value, *_: value)
    monkeypatch.setattr(cli, "log_action", lambda *_: None)
    dagster_server.guard_application(cli, "0123456789abcdef")
    context = types.SimpleNamespace(instance=None)
    cli.host_dagster_ui_with_workspace_process_context(context, "127.0.0.1", 3000, "", "warning")
    (app,) = served
    assert isinstance(app, WebGuard)
    assert (app.token, app.graphql) == ("0123456789abcdef", "/graphql")
    assert app.app == dagster_server.MlflowRedirect("the application")


def test_an_unknown_webserver_is_refused() -> None:
    with pytest.raises(RftError, match="not supported"):
        dagster_server.guard_application(types.ModuleType("cli"), "0123456789abcdef")


def test_mlflow_reads_the_variables_that_are_set_for_it() -> None:
    with warnings.catch_warnings(action="ignore"):  # what MLflow's imports warn of is its own affair
        from mlflow import environment_variables
        from mlflow.server import constants

    assert environment_variables._MLFLOW_SGI_NAME.name == "_MLFLOW_SGI_NAME"
    assert environment_variables._MLFLOW_SERVER_BOOT_ID.name == "_MLFLOW_SERVER_BOOT_ID"
    assert environment_variables._MLFLOW_IN_JOB_EXECUTOR.name == "_MLFLOW_IN_JOB_EXECUTOR"
    assert environment_variables.MLFLOW_SERVER_ALLOWED_HOSTS.name == "MLFLOW_SERVER_ALLOWED_HOSTS"
    assert constants.BACKEND_STORE_URI_ENV_VAR


def test_mlflow_without_a_database_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(mlflow_server.BACKEND, raising=False)
    options = mlflow_server.options_parser().parse_args(["--artifact-root", "folder"])
    with pytest.raises(UserError, match="MLFLOW_BACKEND_STORE_URI is not set"):
        mlflow_server.guarded_application(options, "0123456789abcdef")


def test_mlflows_page_opens_the_part_for_training() -> None:
    with warnings.catch_warnings(action="ignore"):
        from mlflow import server

    response = server.app.response_class
    page = mlflow_server._open_runs(response("<html><head><title>MLflow</title></head></html>", mimetype="text/html"))
    assert page.get_data(as_text=True).startswith("<html><head><script>")
    answer = response('{"head": "<head>"}', mimetype="application/json")
    assert mlflow_server._open_runs(answer).get_data(as_text=True) == '{"head": "<head>"}'
    scripts = Path(server.__file__).with_name("js").glob("build/static/js/main.*.js")
    code = "".join(script.read_text() for script in scripts)
    assert 'key:"mlflow.workflowType",version:1' in code, "stored in the browser as mlflow.workflowType_v1"
    assert f'="{WORKFLOW}"' in code and 'get("workflowType")' in code


def test_a_server_without_the_guard_is_not_taken_for_ready(unguarded: str) -> None:
    with pytest.raises(RftError, match="answers without an access token"):
        serves_guarded(unguarded, "/")()
