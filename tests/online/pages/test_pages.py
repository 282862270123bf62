"""The pages in a real browser: they load nothing from elsewhere, work with the keyboard, and fit a phone."""

import base64
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from rft_platform.inference.serving.http_server import server_config
from rft_platform.online.gateway.app import CommitRule, build_app
from rft_platform.online.pages.routes import PageData, Progress, ProjectProgress, page_routes
from rft_platform.online.releases.commands import ReleaseCommands, ServableVersion
from rft_platform.online.releases.store import ReleaseStore
from rft_platform.online.traffic.alerts import Watch, traffic_figures
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.history import first_call, traffic_history
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.preferences import PreferenceStore
from rft_platform.online.traffic.reader import TrafficReader
from rft_platform.online.traffic.round_rows import RoundRule
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter
from rft_platform.openai_api.errors import ApiError
from rft_platform.web_guard.checks import bearer_token
from tests.e2e.browser import Tab, browser

SCRIPT = "<script>document.title = 'broken'</script>"
LONG = "Add both numbers. " * 12
ANSWERS = {
    "What is 12*7?": ("12*7 is 84, because 10*7 = 70 and 2*7 = 14.", "It is 74."),
    "Where is my order?": (LONG, f"I do not know. {SCRIPT}"),
    "Say hello": ("Hello!", "hi"),
}
ALERTS = {"question_rate": "answers that are questions: 34.0%, the limit is 30.0%"}
FAILING = "daemon ended with exit code 1, 4 times in ten minutes: started again in 5 s"
#: A folder for pictures of the pages.
PICTURES = os.environ.get("RFT_TEST_PICTURES")


class Site:
    """The pages before a database with traffic."""

    def __init__(self, folder: Path, keys: dict[str, str]) -> None:
        self.engine = engine = open_database(f"sqlite:///{folder / 'traffic.db'}")
        self.traffic, self.preferences = TrafficStore(engine), PreferenceStore(engine)
        versions = [ServableVersion(8 * n, n, str(n), True, {"sampled_pass": 0.4 + n / 10}) for n in range(4)]
        self.commands = ReleaseCommands(ReleaseStore(engine), lambda: versions)
        self._keys = keys
        waiting = ("r0004 collects rows when 64 are committed, 12 so far",)
        writer, reader = TrafficWriter(self.traffic), TrafficReader()
        data = PageData(
            project="shop/helper", releases=self.commands, preferences=self.preferences, traffic=self.traffic,
            writer=writer, reader=reader, tenant_of=self._tenant,
            progress=lambda: Progress("Last round: r0003 published version 24, mean reward 0.7.", waiting, (FAILING,)),
            watch=lambda: Watch(3, traffic_figures(engine, -1.0, {}), ALERTS),
            history=partial(traffic_history, engine), first_call=partial(first_call, engine),
        )  # fmt: skip
        gateway: Any = SimpleNamespace(tenant_of=self._tenant, aclose=self._closed)
        app = build_app(gateway, writer, reader, CommitRule(), pages=page_routes(data))
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(server_config(app, 1, log_config=None))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def fill(self) -> None:
        for number, (question, answers) in enumerate(ANSWERS.items()):
            messages = [{"role": "user", "content": question}]
            self.traffic.record(
                NewCall(f"m{number}", choice, {"messages": messages, "tools": [], "response": {"content": text}}, 24,
                        10, time.time() - 40) for choice, text in enumerate(answers)
            )  # fmt: skip
        for choice in range(2):
            self.traffic.give_feedback(NewFeedback(f"f{choice}", ["m0"], 1.0, choice=choice))

    def _tenant(self, headers: Any) -> str:
        tenant = self._keys.get(bearer_token(headers) or "") if self._keys else ""
        if tenant is None:
            raise ApiError(401, "no key")
        return tenant

    async def _closed(self) -> None:
        """Nothing to close."""

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, {})
    made.fill()
    yield made
    made.close()


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with browser(tmp_path / "profile") as opened:
        yield opened


def picture(tab: Tab, name: str) -> None:
    if PICTURES:
        shot = tab.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        (Path(PICTURES) / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


def phone(tab: Tab) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)


def fits(tab: Tab) -> bool:
    return bool(tab.run("document.documentElement.scrollWidth <= window.innerWidth"))


#: The colour of the first line that is drawn.
COLOUR = "Chart.getChart(document.querySelector('canvas')).data.datasets[0].borderColor"


def drawn(tab: Tab) -> list[tuple[str, list[Any]]]:
    """Name and values of the first series of each chart that Chart.js has drawn."""
    first = "Object.values(Chart.instances).map(each => each.data.datasets[0]).map(each => [each.label, each.data])"
    return [(name, values) for name, values in tab.run(first)]


def press(tab: Tab, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key=key)


@pytest.mark.slow
def test_the_status_page_is_live(site, tab) -> None:
    tab.open(site.url)
    text = tab.run("document.body.innerText")
    assert tab.run("location.pathname") == "/status"
    assert "Version 24 serves" in text
    assert "r0004 collects rows when 64 are committed, 12 so far" in text
    numbers = tab.run("[...document.querySelectorAll('.numbers article')].map(each => each.innerText)")
    assert [each.split("\n") for each in numbers] == [
        ["4", "wait for feedback"], ["2", "labelled"], ["0", "committed"], ["0", "consumed"],
    ]  # fmt: skip
    versions = tab.run("[...document.querySelectorAll('[aria-label=Versions] tbody tr')].map(each => each.innerText)")
    assert [each.split("\t")[2:] for each in versions][-2:] == [["0", "none", "2", "yes"], ["6", "1.000", "3", "yes"]]
    assert "History of the last hour" in text
    warnings = tab.run("[...document.querySelectorAll('[role=alert] li')].map(each => each.innerText)")
    assert warnings == [FAILING, ALERTS["question_rate"]]
    assert "3 committed rows are above the share of their task, user or tenant" in text
    rows = tab.run("[...document.querySelectorAll('[aria-label=Actions] tr')].map(each => each.innerText)")
    assert [row.split("\t")[0] for row in rows[1:]] == ["valid tool call", "invalid tool call", "question", "answer"]
    assert rows[4].split("\t") == ["answer", "100.0 %", "1.000"]
    site.commands.canary(16, share=0.25, reason="try the earlier one")
    tab.wait_for("document.body.innerText.includes('try the earlier one')")
    assert "gets 25 % of the traffic" in tab.run("document.body.innerText")
    site.traffic.commit()
    tab.wait_for("document.querySelectorAll('.numbers strong')[2].innerText === '2'")
    picture(tab, "online_status")
    assert fits(tab)
    charts = tab.run("[...document.querySelectorAll('[aria-label=History] article')].map(each => each.innerText)")
    assert [each.split("\n")[0] for each in charts] == [
        "Success", "Calls", "Latency", "Label delay", "Versions",
    ]  # fmt: skip
    assert len(drawn(tab)) == 4, "no call has a latency"
    assert [sum(values) for name, values in drawn(tab) if name == "calls"] == [6]
    light = tab.run(COLOUR)
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    tab.wait_for(f"{COLOUR} !== {json.dumps(light)}")
    tab.run("htmx.ajax('GET', '/status/history?window=day', '#history').then(() => 1)")
    tab.wait_for("document.body.innerText.includes('History of the last day')")
    assert len(drawn(tab)) == 4, "charts that the page replaces are drawn again, and the earlier ones removed"
    tab.run("[...document.querySelectorAll('[aria-label=Window] a')].find(each => each.innerText === 'week').click()")
    tab.wait_for("document.body?.innerText.includes('History of the last week')")
    phone(tab)
    assert fits(tab)
    picture(tab, "online_status_phone")
    assert {url.split("/")[2] for url in tab.statuses if url.startswith("http")} == {site.url.split("/")[2]}
    assert set(tab.statuses.values()) <= {200, 307, 404}


@pytest.mark.slow
def test_preferences_by_keyboard(site, tab) -> None:
    tab.open(f"{site.url}/preferences")
    tab.wait_for("window.htmx")
    picture(tab, "online_preferences")
    phone(tab)
    assert fits(tab)
    picture(tab, "online_preferences_phone")
    tab.call("Emulation.clearDeviceMetricsOverride")
    shown = []
    for key in ("ArrowLeft", "ArrowDown", "s"):
        left = tab.run("document.querySelector('#left-text').innerText")
        shown.append(left)
        if key == "ArrowLeft":
            tab.run("document.querySelector('textarea').focus()")
            tab.call("Input.insertText", text="clear and short")
            press(tab, "ArrowRight")  # moves the cursor of the text, and picks nothing
            tab.run("document.activeElement.blur()")
        press(tab, key)
        tab.wait_for(f"document.querySelector('#left-text')?.innerText !== {json.dumps(left)}")
    tab.wait_for("document.body.innerText.includes('No pair waits')")
    assert tab.run("document.title").startswith("Preferences"), "an answer is text, not HTML"
    assert site.preferences.decided() == 2
    (row,) = site.preferences.pairs()
    assert row["chosen"][0]["content"].strip() == shown[0].strip()
    picture(tab, "online_preferences_empty")


@pytest.mark.slow
def test_preferences_by_mouse(site, tab) -> None:
    tab.open(f"{site.url}/preferences")
    tab.wait_for("window.htmx")
    right = tab.run("document.querySelector('#right-text').innerText")
    tab.run("document.querySelector('button[value=right]').click()")
    tab.wait_for(f"document.querySelector('#right-text').innerText !== {json.dumps(right)}")
    assert site.preferences.pairs()[0]["chosen"][0]["content"].strip() == right.strip()
    lines = httpx.get(f"{site.url}/preferences/pairs.jsonl", trust_env=False).text.splitlines()
    assert json.loads(lines[0])["prompt"]


def test_requests_of_other_sites_and_wrong_forms_are_refused(site) -> None:
    form = {"left": "1", "right": "2", "picked": "left"}

    def post(data: Any, **headers: str) -> int:
        return httpx.post(f"{site.url}/preferences", data=data, headers=headers, trust_env=False).status_code

    assert post(form, origin="http://evil.example") == 403
    assert post({**form, "left": "x"}) == post({**form, "picked": "best"}) == post({**form, "right": "99"}) == 400
    assert post({**form, "comment": "x" * 200_000}) == 413
    assert post({**form, "comment": "a\0"}) == post({**form, "rater": "a\0"}) == 400
    assert post({**form, "rater": "r" * 300}) == 200
    with site.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT rater FROM preferences").scalar() == "r" * 200
    assert httpx.get(f"{site.url}/static/..%2froutes.py", trust_env=False).status_code == 404
    policy = httpx.get(f"{site.url}/status", trust_env=False).headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")


def test_the_status_page_names_the_reason_why_released_versions_do_not_serve(tmp_path) -> None:
    site = Site(tmp_path, {})
    try:
        page = httpx.get(f"{site.url}/status", trust_env=False).text
        assert "until the next decision" not in page
        site.commands.promote(8)
        page = httpx.get(f"{site.url}/status", trust_env=False).text
        assert "version 8 serves until the next decision, and 16, 24 wait" in page
        assert "run `rft models promote --newest`" in page
    finally:
        site.close()


def test_the_status_page_shows_rows_that_no_round_trains_on(site) -> None:
    page = httpx.get(f"{site.url}/status", trust_env=False).text
    assert "stale" not in page and "untrainable" not in page
    site.traffic.commit()
    site.traffic.settle(1, RoundRule(oldest_version=25))
    site.traffic.record([NewCall("greedy", 0, {"messages": []}, 24, 10, time.time(), trainable=False)])
    page = httpx.get(f"{site.url}/status", trust_env=False).text
    assert "<strong>2</strong>stale" in page and "<strong>1</strong>untrainable" in page
    assert (
        "2 of 2 committed rows have become stale so far, before a training could take them: raise buffer.train" in page
    )


def test_characters_that_reorder_text_are_written_out(site) -> None:
    messages = [{"role": "user", "content": "pay \u202e001 \u2066to\u2069 <Ünal>"}]
    site.traffic.record(
        NewCall("odd", choice, {"messages": messages, "tools": [], "response": {"content": f"yes {choice}"}}, 24, 10,
                time.time()) for choice in range(2)
    )  # fmt: skip
    page = httpx.get(f"{site.url}/preferences", trust_env=False).text
    assert r"pay \u202e001 \u2066to\u2069 &lt;Ünal&gt;" in page
    assert not set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069") & set(page)


def test_a_sentence_with_a_semicolon_stays_one_line(tmp_path) -> None:
    sentences = ["an alert is open; `rft models resume` continues the training", "next: explore r0004"]
    project: Any = SimpleNamespace(home=SimpleNamespace(logs=tmp_path), store=SimpleNamespace(rounds=list))
    assert ProjectProgress(project, lambda _: sentences)().waiting == tuple(sentences)


def test_pages_require_an_api_key(tmp_path) -> None:
    site = Site(tmp_path, {"secret-admin": "admin", "secret-shop": "shop"})

    def get(path: str, key: str | None = None) -> httpx.Response:
        return httpx.get(site.url + path, auth=("", key) if key else None, trust_env=False)

    try:
        for path in ("/status", "/status/live", "/preferences", "/preferences/next", "/preferences/pairs.jsonl"):
            answer = get(path)
            assert (answer.status_code, answer.headers["www-authenticate"][:5]) == (401, "Basic")
            assert get(path, "wrong").status_code == 401
            assert get(path, "secret-admin").status_code == 200
        assert get("/status", "secret-shop").status_code == 401
        assert get("/preferences", "secret-shop").status_code == 200
    finally:
        site.close()
