"""MLflow links of the Dagster interface lead to where MLflow runs, under the name that the browser uses."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from rft_platform.model_registry.pages import ADDRESS, run_link, version_link
from rft_platform.servers.dagster_server import MlflowRedirect

TRAINING = "?workflowType=machine_learning"  # MLflow's part for training


async def dagster(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def answer(path: str, host: str = "127.0.0.1:3000", prefix: str = "") -> tuple[int, str]:
    """Status and location of the answer to a request."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "path": path, "headers": [(b"host", host.encode())], "root_path": prefix}
        await MlflowRedirect(dagster)(scope, dagster, send)

    asyncio.run(ask())
    return sent[0]["status"], dict(sent[0]["headers"]).get(b"location", b"").decode()


@pytest.mark.parametrize(
    ("address", "host", "location"),
    [
        ("http://127.0.0.1:5000", "127.0.0.1:3000", "http://127.0.0.1:5000/"),
        ("http://127.0.0.1:5000", "localhost:3000", "http://localhost:5000/"),
        ("http://127.0.0.1:5000", "[::1]:3000", "http://[::1]:5000/"),
        ("http://127.0.0.1:5000", "evil.example", "http://127.0.0.1:5000/"),
        ("https://mlflow.example/tracking", "127.0.0.1:3000", "https://mlflow.example/tracking"),
    ],
)
def test_the_redirect_keeps_the_name_that_the_browser_uses(
    monkeypatch: pytest.MonkeyPatch, address: str, host: str, location: str
) -> None:
    monkeypatch.setenv(ADDRESS, address)
    assert answer("/mlflow", host) == (302, location)
    assert answer("/mlflow/", host) == (302, location)
    assert answer("/assets", host) == (200, "")


def test_a_link_without_an_address_names_the_missing_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    assert answer("/mlflow") == (404, "")


def test_links_without_a_redirect_start_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "https://mlflow.example/base/")
    assert run_link("3", "abc") == f"https://mlflow.example/base/#/experiments/3/runs/abc/model-metrics{TRAINING}"


def test_links_name_the_page_after_the_hash() -> None:
    assert run_link("3", "abc") == f"/mlflow#/experiments/3/runs/abc/model-metrics{TRAINING}"
    assert version_link("team/model one", 2) == f"/mlflow#/models/team%2Fmodel%20one/versions/2{TRAINING}"
