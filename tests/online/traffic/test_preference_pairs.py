"""Preferences of people: which pairs are shown, what is kept, and the pairs that DPO reads."""

import json
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.erasure import Person, TrafficErasure
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.preferences import PreferenceStore
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.tasks.offline_dataset import Columns, load_pairs

QUESTION = [{"role": "user", "content": "What is 12*7?"}]


class Calls:
    """A database of calls and preferences."""

    def __init__(self, url: str) -> None:
        self.engine = open_database(url)
        self.traffic, self.preferences = TrafficStore(self.engine), PreferenceStore(self.engine)

    def add(self, msg_id: str, *texts: str, messages: Any = QUESTION, version: int = 1, **place: str) -> None:
        calls = [
            NewCall(
                msg_id, choice, {"messages": messages, "tools": [], "response": {"role": "assistant", "content": text}},
                version, 10, 0.0, **place,
            )
            for choice, text in enumerate(texts)
        ]  # fmt: skip
        self.traffic.record(calls)


@pytest.fixture
def calls(database_url) -> Calls:
    return Calls(database_url)


def test_choices_of_a_request_are_a_pair_until_one_is_picked(calls) -> None:
    assert calls.preferences.next_pair() is None
    calls.add("m", "84", "83")
    pair = calls.preferences.next_pair()
    assert {pair.left_text, pair.right_text} == {"84", "83"}
    assert pair.messages == [{"role": "user", "text": "What is 12*7?"}]
    better = "left" if pair.left_text == "84" else "right"
    calls.preferences.pick(pair.left, pair.right, better, "correct", "ann")
    assert calls.preferences.next_pair() is None
    (row,) = calls.preferences.pairs()
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("84", "83")
    calls.preferences.pick(pair.left, pair.right, "tie")
    assert (calls.preferences.pairs(), calls.preferences.decided()) == ([], 1)
    calls.preferences.pick(pair.left, pair.right, "skip")
    assert calls.preferences.decided() == 0


def test_answers_of_two_versions_are_a_pair(calls) -> None:
    calls.add("a", "84", version=1)
    calls.add("b", "84", version=2)
    calls.add("c", "85", version=2, messages=[{"role": "user", "content": "other"}])
    assert calls.preferences.next_pair() is None, "equal answers, and answers to another question"
    calls.add("d", "12*7 is 84", version=2)
    pair = calls.preferences.next_pair()
    calls.preferences.pick(pair.left, pair.right, "right")
    (row,) = calls.preferences.pairs()
    assert {row["chosen_version"], row["rejected_version"]} == {1, 2}


def test_sides_are_balanced(calls) -> None:
    sides = []
    for number in range(60):
        calls.add(f"m{number}", "first", "second", messages=[{"role": "user", "content": str(number)}])
        pair = calls.preferences.next_pair()
        sides.append(pair.left_text)
        calls.preferences.pick(pair.left, pair.right, "skip")
    assert 15 < sides.count("first") < 45


def test_tenants_see_their_own_calls(calls) -> None:
    calls.add("m", "84", "83", tenant="a")
    assert calls.preferences.next_pair("b") is None
    pair = calls.preferences.next_pair("a")
    with pytest.raises(UserError, match="not two different answers"):
        calls.preferences.pick(pair.left, pair.right, "left", tenant="b")
    calls.preferences.pick(pair.left, pair.right, "left", tenant="a")
    assert (len(calls.preferences.pairs("a")), len(calls.preferences.pairs("b"))) == (1, 0)


def test_a_forgotten_person_leaves_no_comment_and_no_pair(calls) -> None:
    calls.add("m", "84", "83", subject="ann")
    pair = calls.preferences.next_pair()
    calls.preferences.pick(pair.left, pair.right, "left", "Ann asked this")
    TrafficErasure(calls.engine).forget(Person("ann", b"key"))
    assert calls.preferences.pairs() == []
    with calls.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT picked, comment FROM preferences").all() == [("left", None)]


@pytest.mark.parametrize(("left", "right", "picked"), [(1, 1, "left"), (1, 9, "left"), (1, 2, "best")])
def test_what_is_no_pair_is_refused(calls, left, right, picked) -> None:
    calls.add("m", "84", "83")
    with pytest.raises(UserError):
        calls.preferences.pick(left, right, picked)


def test_the_pairs_are_a_dataset_for_dpo(calls, tmp_path) -> None:
    weather = [{"role": "user", "content": "weather?"}]
    calls.add("m", "84", "83")
    calls.add("n", "sunny", "rainy", messages=weather)
    calls.add("o", "something", "", messages=[{"role": "user", "content": "empty"}])
    for _ in range(2):
        pair = calls.preferences.next_pair()
        better = "left" if pair.left_text in ("84", "sunny") else "right"
        calls.preferences.pick(pair.left, pair.right, better)
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in calls.preferences.pairs()))
    assert calls.preferences.next_pair() is None, "an empty answer teaches nothing"
    dataset = load_pairs(str(file), Columns(prompt_type="messages"))
    assert [row["chosen"][0]["content"] for row in dataset.rows] == ["sunny", "84"]


def test_rated_answers_are_a_dataset_for_kto(calls, tmp_path) -> None:
    for msg_id, text, value in (
        ("m", "84", 1.0),
        ("n", "83", 0.0),
        ("o", "85", None),
        ("p", "", 1.0),
        ("q", "86", 0.75),
    ):
        calls.add(msg_id, text, messages=[{"role": "user", "content": f"{msg_id}?"}], subject=msg_id)
        if value is not None:
            calls.traffic.give_feedback(NewFeedback(f"f-{msg_id}", [msg_id], value))
    TrafficErasure(calls.engine).forget(Person("q", b"key"))
    file = tmp_path / "ratings.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in calls.preferences.rated_answers(0.5)))
    rows = load_pairs(str(file), Columns(prompt_type="messages")).rows
    assert [(row["completion"][0]["content"], row["label"]) for row in rows] == [("84", True), ("83", False)]
    assert [row["label"] for row in calls.preferences.rated_answers(-1.0)] == [True, True]
