"""`rft view`: search, transcripts and comparisons over a real store, in an HTTP client and in a browser."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.home import Home
from rft_platform.experience.maintenance import retire_round
from rft_platform.experience.record import row_id
from rft_platform.experience.store import ExperienceStore
from rft_platform.online.project import open_project
from rft_platform.rounds.project.record import Judged, Policy, publish, write
from rft_platform.servers.viewer import queries
from rft_platform.servers.viewer.app import _calls, _task_page, new_messages, pieces, serve_view, token_texts, view_app
from rft_platform.servers.viewer.queries import (
    Search,
    find_runs,
    newest,
    rows_of_run,
    runs_of_task,
    versions_of_task,
)
from rft_platform.web_guard.asgi import WebGuard
from tests.e2e.browser import browser
from tests.experience.samples import judged, rollouts
from tests.support.ports import free_port
from tests.support.web import served

TOKEN = "a-token-of-more-than-sixteen-characters"
SCRIPT = "<script>document.title = 'broken'</script>"
PICTURES = os.environ.get("RFT_TEST_PICTURES")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A project with two rounds of two tasks; the second round has another policy version and a two-step run."""
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump({"model": {"model_path": "m"}, "buffer": {"explorer_input": {
        "taskset": {"path": "t.jsonl", "name": "set"}}}}))  # fmt: skip
    store = ExperienceStore(home.rounds)
    for number in (1, 2):
        rows = rollouts(2, 2, round=number, policy_version=4 * number)
        if number == 2:
            asked = [{"role": "user", "content": "Größe 0?"}, {"role": "assistant", "content": "0"},
                     {"role": "user", "content": f"Sure? {SCRIPT}"}]  # fmt: skip
            again = {"role": "assistant", "content": f"Yes {SCRIPT}", "tool_calls": None}
            run = rows[0].run_id
            more = rollouts(
                1, 1, round=2, policy_version=8, step=1, row_id=row_id(run, 1), messages=asked, response=again
            )
            rows = [rows[0], *more, *rows[1:]]
        store.write_rollouts(number, 0, rows)
        store.write_judged(number, "v1", judged(rows, "v1"))
    return home


@pytest.fixture
def store(home: Home) -> ExperienceStore:
    return ExperienceStore(home.rounds)


@pytest.fixture
def url(home: Home) -> Iterator[str]:
    """The guarded pages on a free port."""
    with served(WebGuard(view_app(home), TOKEN)) as url:
        yield url


def test_the_newest_round_is_shown_first(store: ExperienceStore) -> None:
    found = find_runs(store, Search())
    assert found.rounds == [2] and not found.more
    assert [run["calls"] for run in found.rows] == [2, 1, 1, 1]
    assert {run["policy_version"] for run in found.rows} == {8}
    assert found.rows[0]["prompt"] == "Größe 0?"
    assert (found.total, found.mean_reward) == (4, 0.5) and found.rows[0]["seconds"] == pytest.approx(0.25)
    assert find_runs(store, Search(text="nowhere")).mean_reward is None


@pytest.mark.parametrize(
    ("search", "runs"),
    [
        (Search(first=1, last=2), 8),
        (Search(text="größe 1"), 2),
        (Search(text="sure?"), 1),
        (Search(text="%"), 0),
        (Search(first=1, last=2, task="task-0"), 4),
        (Search(first=1, last=2, version=4), 4),
        (Search(taskset="other"), 0),
        (Search(least=1e9), 0),
        (Search(first=1, page=1), 8),  # beyond the end: the last page
        (Search(text="nowhere", page=7), 0),
    ],
)
def test_a_search_finds_whole_runs(store: ExperienceStore, search: Search, runs: int) -> None:
    found = find_runs(store, search)
    assert len(found.rows) == runs
    if search.text == "sure?":
        assert found.rows[0]["calls"] == 2  # also the call without the text


@pytest.mark.parametrize("text", ['He said "Oh"', "a line\nbelow", "C:\\data", 'find "it" in', "über\\all", '{"query"'])
def test_a_search_finds_text_that_json_escapes(tmp_path: Path, text: str) -> None:
    store = ExperienceStore(tmp_path)
    asked = [{"role": "user", "content": 'He said "oh".\nA line\nbelow: C:\\data'}]
    arguments = json.dumps({"query": 'Find "it" in ÜBER\\all'}, ensure_ascii=False)
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    store.write_rollouts(1, 0, [*rollouts(1, 1), *rollouts(1, 1, batch=1, messages=asked, response=answer)])
    assert [run["run_id"] for run in find_runs(store, Search(text=text)).rows] == ["r0001-b0001-t00000-000"]


def test_runs_are_ordered_and_filtered_by_reward(store: ExperienceStore) -> None:
    rewards = [run["reward"] for run in find_runs(store, Search(first=1, last=2, order="-reward")).rows]
    known = [reward for reward in rewards if reward is not None]
    assert known == sorted(known, reverse=True)
    least = known[len(known) // 2]
    found = find_runs(store, Search(first=1, last=2, least=least)).rows
    assert len(found) == sum(reward >= least for reward in known)


def test_a_search_over_too_many_rounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MOST_ROUNDS", most := 3)
    store = ExperienceStore(tmp_path)
    for number in range(1, most + 2):
        store.write_rollouts(number, 0, rollouts(1, 1, round=number))
    with pytest.raises(UserError, match=f"at most {most}"):
        find_runs(store, Search(first=1))
    assert len(find_runs(store, Search(first=2)).rows) == most
    assert newest(store) == [2, 3, 4]


def test_tokens_are_coloured(store: ExperienceStore) -> None:
    run = find_runs(store, Search()).rows[0]["run_id"]
    first, second = rows_of_run(store, 2, run)
    assert [piece.text for piece in pieces(first, None, "logprob")] == [str(token) for token in first["response_ids"]]
    assert {piece.style for piece in pieces(first, None, "mask")} == {"trained", "masked"}
    assert pieces({**first, "advantage": 2.0}, None, "advantage")[0].style == "up2"
    assert pieces({**first, "advantage": -0.5}, None, "advantage")[0].style == "down1"
    assert pieces({**first, "advantage": None}, None, "advantage")[0].style == "zero"
    assert pieces({**first, "rollout_logprobs": [-9.0] * len(first["response_ids"])}, None, "logprob")[0].style == "p4"
    assert "p 36.8%" in pieces({**first, "rollout_logprobs": [-1.0] * 3}, None, "logprob")[0].title
    assert [message["role"] for message in new_messages(second["messages"][:2], second["messages"])] == ["user"]
    assert new_messages([{"role": "user", "content": "other"}], second["messages"]) == second["messages"]
    asked = {"role": "user", "content": "2+2"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]}
    sent_again = {name: value for name, value in call.items() if value is not None}
    result = {"role": "tool", "content": "4"}
    assert new_messages([asked, call], [asked, sent_again, result]) == [result]


def tokenizer(words: list[str], decoder: Any) -> Tokenizer:
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    made.decoder = decoder
    return made


SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def test_tokens_have_the_text_that_they_add() -> None:
    words = ["▁Hello", "▁world", ",", *(f"<0x{byte:02X}>" for byte in "你😀".encode())]
    made = tokenizer(words, SENTENCEPIECE)
    assert token_texts([0, 1, 2, 1, 0], made) == ["Hello", " world", ",", " world", " Hello"]
    assert token_texts([0, 3, 4, 5, 6, 7, 8, 9, 1], made) == ["Hello", "", "", "你", "", "", "", "😀", " world"]
    assert token_texts([0, 1, 3, 4], made) == ["Hello", " world", "", "��"]  # the answer ends within a character
    assert token_texts([], made) == []


def test_bytes_that_are_no_text_do_not_make_the_pieces_slow() -> None:
    made = tokenizer(["<0xFF>", "▁a"], SENTENCEPIECE)
    texts = token_texts([0] * 20_000 + [1], made)
    assert "".join(texts) == "\ufffd" * 20_000 + " a" and texts[-1] == " a"


def test_each_call_is_shown_with_the_tokenizer_of_its_policy(home: Home, tmp_path: Path) -> None:
    project = open_project(home)
    for name in (DEFAULT_POLICY, "wolf"):
        policy = Policy(folder=str(tmp_path / name), policy_version=0, weights_digest="d", round=0, name=name)
        publish(project.store, policy)
    (row,) = rows_of_run(project.store, 1, "r0001-b0000-t00000-000")
    rows = [{**row, "response_ids": [0] * 3, "policy": name} for name in (DEFAULT_POLICY, "wolf")]
    assert [piece.text for call in _calls(project, rows, "mask") for piece in call["pieces"]] == ["0"] * 6
    for name, word in ((DEFAULT_POLICY, "mine"), ("wolf", "wolf's")):
        (tmp_path / name).mkdir()
        tokenizer([word], decoders.Fuse()).save(str(tmp_path / name / "tokenizer.json"))
    shown = [call["pieces"][0].text for call in _calls(project, rows, "mask")]
    assert shown == ["mine", "wolf's"]


def test_the_runs_of_a_task_under_a_policy(store: ExperienceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions_of_task(store, "task-0", [1, 2]) == [4, 8] and versions_of_task(store, "other", [1, 2]) == []
    found = runs_of_task(store, "task-0", [1, 2], 8)
    assert [(run["policy_version"], run["calls"]) for run in found.rows] == [(8, 2), (8, 1)]
    assert [run["prompt"] for run in found.rows] == ["Größe 0?"] * 2
    assert [run["answer"]["content"] for run in found.rows] == [f"Yes {SCRIPT}", "1"]
    assert (found.total, found.more) == (2, False)
    monkeypatch.setattr(queries, "MOST_OF_TASK", 1)
    cut = runs_of_task(store, "task-0", [1, 2], 8)
    assert (len(cut.rows), cut.total, cut.more, cut.mean_reward) == (1, 2, True, found.mean_reward)


def test_a_task_page_says_when_runs_are_left_out(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MOST_OF_TASK", 1)
    page = bytes(_task_page(home, "task-0", "", None, None).body).decode()
    assert "Version 4" in page and "Version 8" in page and "2 runs, mean reward" in page
    assert page.count("the first 1 are shown, choose fewer rounds") == 2


def test_pages_need_the_token_and_escape_text(url: str) -> None:
    assert httpx.get(url).status_code == 401
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}) as client:
        page = client.get("/runs", params={"text": SCRIPT}).text
        assert SCRIPT not in page and "&lt;script&gt;" in page
        run = find_runs_link(page)
        transcript = client.get(run).text
        assert SCRIPT not in transcript and "Sure? &lt;script&gt;" in transcript
        assert row_id(run.rpartition("/")[2], 1) in transcript, "`rft trace` takes the id of a row"
        for colour in ("logprob", "advantage", "mask"):
            assert client.get(run, params={"colour": colour}).status_code == 200
        compared = client.get("/tasks/task-0").text
        assert "Version 4" in compared and "Version 8" in compared and SCRIPT not in compared
        assert "default-src 'self'" in client.get("/").headers["content-security-policy"]


def test_the_task_of_a_run_of_an_earlier_round_has_a_link_that_works(
    url: str, store: ExperienceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MOST_ROUNDS", 2)
    store.write_rollouts(3, 0, rollouts(1, 1, round=3, task_id="another"))
    store.write_rollouts(4, 0, rollouts(1, 1, round=4, task_id="another"))
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}) as client:
        listed = client.get("/runs?first=1&last=1").text
        for page in (listed, client.get(find_runs_link(listed)).text):
            link = re.search(r'"(/tasks/task-0[^"]*)"', page)
            assert link is not None
            assert client.get(link[1]).status_code == 200, link[1]
        assert '"/tasks/another"' in client.get("/runs").text


def test_ids_of_production_traffic_have_pages(home: Home, store: ExperienceStore) -> None:
    rows = rollouts(1, 2, round=3, policy_version=12, task_id="shop/task")
    for row in rows:
        row.run_id = f"online/{row.task_id}/{row.run_id}"
    store.write_rollouts(3, 0, rows)
    store.write_judged(3, "v1", judged(rows, "v1"))
    write(store, 3, Judged("v1", True, len(rows), 0.5))
    client = TestClient(view_app(home))
    for page in ("/", "/runs"):
        links = re.findall(r'"(/(?:runs/3|tasks)/[^"]*)"', client.get(page).text)
        assert {link.split("/")[1] for link in links} == {"runs", "tasks"}
        assert {client.get(link).status_code for link in links} == {200}, links


def test_a_run_without_messages_is_on_the_page_of_its_task(home: Home, store: ExperienceStore) -> None:
    store.write_rollouts(3, 0, rollouts(1, 1, round=3, policy_version=12, task_id="erased", messages=[]))
    page = TestClient(view_app(home)).get("/tasks/erased")
    assert page.status_code == 200 and "1 runs" in page.text and "None" not in page.text


def test_a_search_says_which_rounds_were_retired(url: str, store: ExperienceStore) -> None:
    retire_round(store, 1)
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}) as client:
        page = client.get("/runs?first=1").text
        assert "Round 1: 4 rollout rows were retired on" in page and "they were deleted." in page
        assert "were retired" not in client.get("/runs").text


def test_a_server_takes_connections_before_its_link_is_printed(home: Home) -> None:
    port = free_port()

    def listening() -> None:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve_view(home, "127.0.0.1", port, TOKEN, listening)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/runs?first=x", 400, "first 'x': expected a number"),
        ("/runs?page=99999999999999999999", 200, "4 runs"),
        ("/runs?version=99999999999999999999", 200, "0 runs"),
        ("/runs?order=best", 400, "order 'best': expected one of newest"),
        ("/runs/2/nothing", 404, "round 2 has no run 'nothing'"),
        ("/runs/9/nothing", 404, "round 9 has no run 'nothing'"),
        ("/tasks/nothing", 404, "no run of task 'nothing'"),
        ("/runs/2/r0002-b0000-t00000-000?colour=red", 400, "colour 'red': expected one of"),
    ],
)
def test_the_error_of_a_bad_request_names_the_expected_value(url: str, path: str, status: int, message: str) -> None:
    answer = httpx.get(f"{url}{path}", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == status and message in answer.text


@pytest.mark.slow
def test_keys_and_a_phone_in_a_browser(url: str, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as tab:
        tab.open(f"{url}/runs?token={TOKEN}")
        for _ in range(2):
            tab.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'j', bubbles: true}))")
        assert tab.run("[...document.querySelectorAll('a.run')].indexOf(document.activeElement)") == 1
        tab.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true}))")
        assert tab.run("document.activeElement.name") == "text"
        tab.run("document.querySelector('a.run').click()")
        tab.wait_for("document.querySelectorAll('.tokens span').length > 3")
        assert tab.run("document.title").startswith("Run ")  # the script in the text did not run
        if PICTURES:
            tab.picture(Path(PICTURES) / "view_run.png")
        tab.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        for page in ("/", "/runs", "/runs/2/r0002-b0000-t00000-000", "/tasks/task-0"):
            tab.open(f"{url}{page}")
            assert tab.run("document.documentElement.scrollWidth") <= 390, page
        bad = {address: status for address, status in tab.statuses.items() if status >= 400}
        assert not {address for address in bad if "favicon" not in address}, bad


def find_runs_link(page: str) -> str:
    """The address of the first run in a page."""
    return page.split('class="run" href="')[1].split('"')[0]
