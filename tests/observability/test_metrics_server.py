"""The exporter as a server of the interface, and as its own command."""

import socket

import httpx
import pytest
from typer.testing import CliRunner

from rft_platform.cli.main import app
from rft_platform.cluster.local.supervisor import serving
from rft_platform.rounds.project.project import Project
from rft_platform.servers.ui_servers import ui_servers
from rft_platform.web_guard.token import access_token
from tests.support.ports import free_port


@pytest.mark.slow
def test_the_interface_serves_metrics_only_if_requested(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_LOG_FORMAT", "json")
    dagster, *others = ui_servers(project.home, 3000, 5000, daemon=True)
    assert dagster.pages["results"].startswith("http://127.0.0.1:3000/assets/evaluation_report?token=")
    names = [server.name for server in (dagster, *others)]
    assert names == ["Dagster", "MLflow", "daemon"]
    port = free_port()
    servers = {server.name: server for server in ui_servers(project.home, 3000, 5000, True, metrics_port=port)}
    for name in ("Dagster", "daemon"):
        service = servers[name].service
        assert service is not None and service.arguments[-2:] == ("--log-format", "json")
    metrics = servers["metrics"].service
    assert metrics is not None
    with serving(project.home.own_servers, [metrics]):
        assert servers["metrics"].url == f"http://127.0.0.1:{port}/metrics"
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert httpx.get(servers["metrics"].url, headers=headers, trust_env=False).status_code == 401
        bearer = {"authorization": f"Bearer {access_token(project.home.web_token)}"}
        for foreign in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert httpx.get(servers["metrics"].url, headers=bearer | foreign, trust_env=False).status_code == 403
        text = httpx.get(servers["metrics"].url, headers=bearer, trust_env=False, timeout=60.0).text
    assert "rft_rounds_budget 1000.0" in text


@pytest.mark.parametrize("command", ["metrics", "view"])
def test_an_address_of_another_machine_gives_a_one_line_error(
    project: Project, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("RFT_HOME", str(project.home.root))
    monkeypatch.setenv("DAGSTER_HOME", str(project.home.dagster))
    options = ["--host", "203.0.113.1", "--port", str(free_port())]
    done = CliRunner().invoke(app, [command, *options])
    assert done.exit_code == 2
    assert f"port {options[-1]} of 203.0.113.1 cannot be used" in done.output and "--host" in done.output


def test_a_port_in_use_gives_a_one_line_error(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_HOME", str(project.home.root))
    monkeypatch.setenv("DAGSTER_HOME", str(project.home.dagster))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = CliRunner().invoke(app, ["metrics", "--port", str(port)])
    assert done.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in done.output
