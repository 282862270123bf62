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
from tests.support.traffic import SCRIPT, START, fill


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


def test_the_page_finds_calls_and_saves_them(home: Home) -> None:
    client = TestClient(view_app(home))
    assert "No call matches in the last day" in client.get("/production").text
    since = {"since": "2023-11-14T22:00"}
    page = client.get("/production", params=since).text
    assert SCRIPT not in page and "Order 3? &lt;script&gt;" in page and "team=sales" in page
    assert "<td>shop</td>" in page and "0.0001" in page  # 33 tokens at 2 a million
    assert page.count('<td title="m') == 4
    found = client.get("/production", params={**since, "metric": "helpful", "least": "0.6"}).text
    assert found.count('<td title="m') == 1
    link = found.split('href="/production/dataset.jsonl')[1].split('"')[0].replace("&amp;", "&")
    saved = client.get(f"/production/dataset.jsonl{link}")
    assert [json.loads(line)["msg_id"] for line in saved.text.splitlines()] == ["m1"]
    assert "attachment" in saved.headers["content-disposition"]
    assert 'href="/production"' in client.get("/").text


def test_fields_that_are_not_valid_and_projects_without_traffic_are_refused(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="since 'yesterday': expected a time"):
        call_search({"since": "yesterday"})
    with pytest.raises(UserError, match="least 'x': expected a number"):
        call_search({"least": "x"})
    assert call_search({"since": "2023-11-14T22:13:20"}) == CallSearch(since=START)
    offline = Home(tmp_path / "offline")
    write_text(offline.config_file, yaml.safe_dump({"model": {"model_path": "m"}, "buffer": {"explorer_input": {
        "taskset": {"path": "t.jsonl"}}}}))  # fmt: skip
    client = TestClient(view_app(offline))
    assert client.get("/production").status_code == 400 and "/production" not in client.get("/").text
