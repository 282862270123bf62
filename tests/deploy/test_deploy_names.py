"""Commands, options, ports, variables and extras that ``deploy/`` names exist in the code."""

import importlib.util
import json
import re
import shlex
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
from click.testing import CliRunner
from typer.main import get_command

from rft_platform.cli.main import app
from rft_platform.model_registry.pages import ADDRESS
from rft_platform.servers import dagster_server, mlflow_server
from rft_platform.web_guard.checks import configured_hosts
from tests.deploy.files import DEPLOY, MANIFESTS, REPOSITORY, containers, documents, text_of_all


def commands() -> Iterator[list[str]]:
    """Every command that an image, a service or a pod runs."""
    for line in re.findall(r"CMD (\[.+\])", (DEPLOY / "Dockerfile").read_text()):
        yield json.loads(line)
    for service in documents(DEPLOY / "compose.yaml")[0]["services"].values():
        yield [str(part) for part in service.get("command", [])]
        yield service.get("healthcheck", {}).get("test", ["CMD"])[1:]
    for document in (document for file in MANIFESTS for document in documents(file)):
        for container in containers(document):
            yield [*container.get("command", []), *container.get("args", [])]
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                yield container.get(probe, {}).get("exec", {}).get("command", [])


def test_every_command_and_option_of_the_deploy_files_exists() -> None:
    seen = set()
    for command in filter(None, commands()):
        program, *arguments = command
        seen.add(program)
        if program == "pg_isready":
            continue
        if program == "python":
            if arguments[0] == "-m":
                assert importlib.util.find_spec(arguments[1]) is not None, command
                if arguments[1] in OPTIONS:
                    options = [argument.split("=")[0] for argument in arguments[2:] if argument.startswith("-")]
                    assert OPTIONS[arguments[1]]() >= set(options), shlex.join(command)
            else:
                compile(arguments[1], "healthcheck", "exec")
            continue
        options = [argument.split("=")[0] for argument in arguments if argument.startswith("-")]
        names = [argument for argument in arguments if re.fullmatch(r"[a-z][a-z-]*", argument)]
        assert _known_options(program, names) >= set(options), shlex.join(command)
    assert seen == {"dagster", "dagster-daemon", "rft", "python", "pg_isready"}


def _webserver_options() -> set[str]:
    from dagster_webserver.cli import dagster_webserver

    return {option for parameter in dagster_webserver.params for option in parameter.opts}


OPTIONS = {
    dagster_server.__name__: _webserver_options,
    mlflow_server.__name__: lambda: set(mlflow_server.options_parser()._option_string_actions),
}


def _known_options(program: str, names: list[str]) -> set[str]:
    """Options of the (sub)command that the leading ``names`` lead to; fails where there is none of that name."""
    command = _entry_point(program)
    while hasattr(command, "commands") and names:
        assert names[0] in command.commands, f"{program} has no command {names[0]}"
        command = command.commands[names.pop(0)]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def _entry_point(program: str) -> Any:
    if program == "rft":
        return get_command(app)
    entry = next(iter(metadata.entry_points(group="console_scripts", name=program)))
    with warnings.catch_warnings(action="ignore"):  # what mlflow says as it is imported is its own affair
        found = entry.load()
    if hasattr(found, "params"):
        return found
    return _group_behind(program)


def _group_behind(program: str) -> Any:
    if program == "dagster":
        from dagster._cli import create_dagster_cli

        return create_dagster_cli()
    from dagster._daemon.cli import create_dagster_daemon_cli

    return create_dagster_daemon_cli()


def test_every_rft_variable_of_the_deploy_files_is_read_by_the_code() -> None:
    code = "\n".join(file.read_text() for file in (REPOSITORY / "rft_platform").rglob("*.py"))
    of_compose = {"RFT_CODE_HOST", "RFT_IMAGE", "RFT_POSTGRES_PASSWORD", "RFT_PROJECT_FILES"}  # of compose itself
    named = {"RFT_ENGINE_TOKEN"}  # by engine.token_env
    for name in set(re.findall(r"\bRFT_[A-Z_]+\b", text_of_all())) - of_compose - named:
        assert name in code, name
    assert "env: RFT_CODE_HOST" in (DEPLOY / "workspace.yaml").read_text()


def test_named_volumes_of_the_image_belong_to_its_user() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (owned,) = re.findall(r"install --directory --owner=rft --group=rft (.*)", dockerfile)
    compose = documents(DEPLOY / "compose.yaml")[0]
    mounted = [
        volume.split(":")
        for service in compose["services"].values()
        if "build" in service
        for volume in service["volumes"]
    ]
    assert {target for source, target, *_ in mounted if source in compose["volumes"]} <= set(owned.split())


def test_ports_are_the_same_everywhere() -> None:
    defaults = {option.name: option.default for option in get_command(app).commands["metrics"].params}
    assert defaults["port"] == 9464
    code_port = documents(DEPLOY / "workspace.yaml")[0]["load_from"][0]["grpc_server"]["port"]
    assert f"EXPOSE {code_port}" in (DEPLOY / "Dockerfile").read_text()
    targets = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    assert targets == ["code:9464"]
    named = set(re.findall(r"port[:=\s\",]+(\d{4})\b", text_of_all(), re.IGNORECASE))
    assert named <= {"3000", "4000", "5000", "5432", "8010", "8100", "9464", "9090"}


def test_the_code_server_of_a_pod_is_reached_from_its_pod_only() -> None:
    code = next(each for each in _all_containers() if each["name"] == "code")
    (default,) = [json.loads(line) for line in re.findall(r"^CMD (\[.+\])$", (DEPLOY / "Dockerfile").read_text(), re.M)]
    assert _as_options(code["args"]) == {**_as_options(default), "--host": "127.0.0.1"}
    assert "ports" not in code


def test_metrics_of_a_pod_are_served_by_its_address() -> None:
    """Prometheus asks for what a ServiceMonitor selects by the addresses of the pods."""
    metrics = [each for each in _all_containers() if each.get("command", [])[:2] == ["rft", "metrics"]]
    assert len(metrics) == 2, "of a project in one pod, and of the training tier"
    for container in metrics:
        names = [each["name"] for each in container["env"]]
        values = {each["name"]: each for each in container["env"]}
        assert values["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert values["RFT_WEB_HOSTS"]["value"].split(",")[-1] == "$(POD_IP)"
        assert names.index("POD_IP") < names.index("RFT_WEB_HOSTS"), "only earlier variables are expanded"


def test_links_of_dagster_to_mlflow_lead_to_a_documented_tunnel() -> None:
    of_dagster = [each for each in _all_containers() if each["name"] in ("webserver", "train")]
    urls = [each["value"] for container in of_dagster for each in container["env"] if each["name"] == ADDRESS]
    assert urls == ["http://127.0.0.1:5000"] * 2
    for file in ("kubernetes.md", "operations.md"):
        assert "kubectl --namespace rft port-forward service/mlflow 5000" in (REPOSITORY / "docs" / file).read_text()


def _all_containers() -> Iterator[Any]:
    for file in MANIFESTS:
        for document in documents(file):
            yield from containers(document)


def _as_options(command: list[str]) -> dict[str, str]:
    program, options = command[:3], " ".join(command[3:]).replace("=", " ").split()
    assert program == ["dagster", "api", "grpc"]
    return dict(zip(options[::2], options[1::2], strict=True))


@pytest.mark.parametrize("further", ["", "rft.example"])
def test_services_of_compose_answer_to_their_names_and_to_further_ones(
    further: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    for service, own in (("metrics", "code"), ("webserver", "code"), ("mlflow", "mlflow")):
        value = services[service]["environment"]["RFT_WEB_HOSTS"]
        monkeypatch.setenv("RFT_WEB_HOSTS", value.replace("${RFT_WEB_HOSTS:-}", further))
        assert configured_hosts() == {own, further} - {""}


def test_containers_with_shared_process_ids_have_one_host_name() -> None:
    """A container's own host name is another one each time it is made."""
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    sharing = {name for name, service in services.items() if service.get("pid") == "service:code"} | {"code"}
    assert sharing == {"code", "webserver", "daemon", "metrics"}
    own = {name for name in sharing if "network_mode" not in services[name]}
    assert {services[name]["hostname"] for name in own} == {"rft"}


def test_the_workspace_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._core.workspace.load import location_origins_from_yaml_paths

    monkeypatch.setenv("RFT_CODE_HOST", "code")
    (origin,) = location_origins_from_yaml_paths([str(DEPLOY / "workspace.yaml")])
    assert (origin.host, origin.port, origin.location_name) == ("code", 4000, "rft_platform")


def test_the_help_of_rft_metrics_names_its_routes() -> None:
    shown = CliRunner().invoke(get_command(app), ["metrics", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert "/metrics" in shown.output
    assert "/healthz" in shown.output
