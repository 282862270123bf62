"""Corrections become demonstrations: which call they are about, which round takes them, what training reads."""

import json
from typing import Any

import pytest

from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.demonstrations import DemonstrationStore
from rft_platform.online.traffic.erasure import Person, TrafficErasure
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.tasks.offline_dataset import Columns, load_conversations
from tests.online.conftest import Clock


@pytest.fixture
def engine(database_url: str):
    return open_database(database_url)


@pytest.fixture
def traffic(engine, clock) -> TrafficStore:
    return TrafficStore(engine, clock)


@pytest.fixture
def demonstrations(engine) -> DemonstrationStore:
    return DemonstrationStore(engine)


def call(msg_id: str, question: str = "What is 12*7?", **changes: Any) -> NewCall:
    earlier = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]
    content = {"messages": [*earlier, {"role": "user", "content": question}], "tools": []}
    given = {"choice": 0, "model_call": content, "policy_version": 3, "tokens": 7, "recorded_at": Clock.now}
    return NewCall(msg_id=msg_id, **(given | changes))


def correct(name: str, *msg_ids: str, correction: str | None = "84", **changes: Any) -> NewFeedback:
    return NewFeedback(name, msg_ids, None, correction=correction, **changes)


def test_a_correction_is_the_answer_of_its_call_and_the_conversation_before_is_context(traffic, demonstrations) -> None:
    traffic.record([call("a"), call("b")])
    traffic.give_feedback(correct("f1", "a"))
    traffic.give_feedback(NewFeedback("f2", ["b"], 1.0, comment="fine"))
    (row,) = demonstrations.rows()
    assert [(each["role"], each["content"], each.get("weight", 1)) for each in row["messages"]] == [
        ("user", "Hello", 1), ("assistant", "Hello!", 0), ("user", "What is 12*7?", 1), ("assistant", "84", 1),
    ]  # fmt: skip
    assert (row["msg_id"], row["choice"], row["policy_version"], row["feedback_id"]) == ("a", 0, 3, "f1")


def test_a_correction_of_a_run_is_about_its_last_call(traffic, demonstrations) -> None:
    traffic.record([call("a", "first"), call("b", "second")])
    traffic.give_feedback(correct("f1", "a", "b"))
    assert [row["msg_id"] for row in demonstrations.rows()] == ["b"]


def test_the_newest_correction_of_a_call_counts(traffic, demonstrations, clock) -> None:
    traffic.record([call("a")])
    traffic.give_feedback(correct("z", "a", correction="83"))
    clock.now += 1
    traffic.give_feedback(correct("b", "a", correction="84"))
    assert [row["messages"][-1]["content"] for row in demonstrations.rows()] == ["84"]


def test_each_round_takes_the_corrections_that_no_round_before_took(traffic, demonstrations) -> None:
    traffic.record([call("a"), call("b")])
    traffic.give_feedback(correct("f1", "a"))
    assert [row["msg_id"] for row in demonstrations.settle(1)] == ["a"]
    traffic.give_feedback(correct("f2", "b"))
    assert [row["msg_id"] for row in demonstrations.settle(2)] == ["b"]
    assert [row["msg_id"] for row in demonstrations.rows(1)] == ["a"]
    assert demonstrations.settle(3) == []


def test_a_corrected_call_does_not_expire_and_a_forgotten_one_is_gone(traffic, demonstrations, engine, clock) -> None:
    erasure = TrafficErasure(engine, clock)
    traffic.record([call("a", subject="ann"), call("b")])
    traffic.give_feedback(correct("f1", "a"))
    clock.now += 100
    assert erasure.expire(older_than_s=50) == 1
    assert [row["msg_id"] for row in demonstrations.rows()] == ["a"]
    erasure.forget(Person("ann", b"key"))
    assert demonstrations.rows() == []


def test_supervised_training_uses_only_the_correction(traffic, demonstrations, tmp_path) -> None:
    traffic.record([call("a"), call("b", "other")])
    traffic.give_feedback(correct("f1", "a"))
    traffic.give_feedback(correct("f2", "b", correction="another"))
    file = tmp_path / "corrections.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in demonstrations.rows()))
    dataset = load_conversations(str(file), Columns())
    assert [row["messages"][-1]["content"] for row in dataset.rows] == ["84", "another"]
    assert all(row["messages"][1]["weight"] == 0 for row in dataset.rows)
