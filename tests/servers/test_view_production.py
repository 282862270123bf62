"""The page of production calls: its form, its escaping, the cost of a key, and the dataset of what was found."""

import json
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.online.project import open_project
from rft_platform.online.traffic.browsing import CallSearch
from rft_platform.online.traffic.project_traffic import traffic_database
from rft_platform.servers.viewer.app import view_app
from rft_platform.servers.viewer.production import call_search
from rft_platform.tasks.offline_dataset import Columns, load_conversations
from rft_platform.web_guard.asgi import WebGuard
from tests.e2e.browser import browser
from tests.support.traffic import SCRIPT, START, fill
from tests.support.web import served

TOKEN = "a-token-of-more-than-sixteen-characters"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An online project with four calls."""
    home = Home(tmp_path / "home")
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    config = {"model": {"model_path": "m", "max_model_len": 64}, "buffer": buffer, "service": {"token_price": 2.0},
              "algorithm": {"algorithm_type": "reinforce++"}}  # fmt: skip
    write_text(home.config_file, yaml.safe_dump(config))
    fill(traffic_database(open_project(home)))
    return home


def test_the_page_finds_calls_and_saves_them(home: Home, tmp_path: Path) -> None:
    client = TestClient(view_app(home))
    assert "No call matches in the last day" in client.get("/production").text
    since = {"since": "2023-11-14T22:00"}
    page = client.get("/production", params=since).text
    assert SCRIPT not in page and "Order 3? &lt;script&gt;" in page and "team=sales" in page
    assert "<td>shop</td>" in page and "0.0001" in page  # 33 tokens at 2 a million
    assert page.count('<td title="m') == 4
    found = client.get("/production", params={**since, "metric": "helpful", "least": "0.6"}).text
    assert found.count('<td title="m') == 1
    assert client.get("/production", params={**since, "state": "labelled"}).text.count('<td title="m') == 2
    link = found.split('href="/production/dataset.jsonl')[1].split('"')[0].replace("&amp;", "&")
    saved = client.get(f"/production/dataset.jsonl{link}")
    assert [json.loads(line)["msg_id"] for line in saved.text.splitlines()] == ["m1"]
    (tmp_path / "production.jsonl").write_text(saved.text, encoding="utf-8")
    loaded = load_conversations(str(tmp_path / "production.jsonl"), Columns(tools="tools"))
    assert [message["role"] for message in loaded.rows[0]["messages"]] == ["system", "user", "assistant"]
    assert "attachment" in saved.headers["content-disposition"]
    assert 'href="/production"' in client.get("/").text


def test_fields_that_are_not_valid_and_projects_without_traffic_are_refused(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="since 'yesterday': expected a time"):
        call_search({"since": "yesterday"})
    with pytest.raises(UserError, match="least 'x': expected a number"):
        call_search({"least": "x"})
    for time in ("2023-11-14T22:13:20", "2023-11-14T22:13:20Z", "2023-11-15T00:13:20+02:00"):
        assert call_search({"since": time}) == CallSearch(since=START)
    offline = Home(tmp_path / "offline")
    write_text(offline.config_file, yaml.safe_dump({"model": {"model_path": "m"}, "buffer": {"explorer_input": {
        "taskset": {"path": "t.jsonl"}}}}))  # fmt: skip
    client = TestClient(view_app(offline))
    assert TestClient(view_app(home)).get(f"/production?version={10**20}").status_code == 200
    assert client.get("/production").status_code == 400 and "/production" not in client.get("/").text


@pytest.mark.slow
def test_the_pages_fit_a_phone_and_obey_their_content_policy(home: Home, tmp_path: Path) -> None:
    with served(WebGuard(view_app(home), TOKEN)) as url, browser(tmp_path / "profile") as tab:
        tab.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        for page in ("/", "/runs", "/production?since=2023-11-14T22:00"):
            tab.open(f"{url}{page}{'&' if '?' in page else '?'}token={TOKEN}")
            tab.wait_for("document.body?.innerText.includes('helper') || document.querySelector('main')")
            assert tab.run("document.documentElement.scrollWidth") <= 390, page
        assert tab.run("document.querySelectorAll('table.calls tbody tr').length") == 4
        assert tab.run("document.title").startswith("Production")  # the script in the prompts did not run
