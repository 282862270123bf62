"""Find recorded calls by metric, tag, version, state, key and time, and make a dataset of them."""

import pytest
from sqlalchemy import Engine

from rft_platform.online.traffic.browsing import CallSearch, KeyUsage, dataset_rows, find_calls, usage_by_key
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.incoming import NewFeedback
from rft_platform.online.traffic.store import TrafficStore
from tests.support.traffic import START, fill


@pytest.fixture
def engine(database_url: str) -> Engine:
    engine = open_database(database_url)
    fill(engine)
    return engine


@pytest.mark.parametrize(
    ("search", "found"),
    [
        (CallSearch(), ["m3", "m2", "m1", "m0"]),
        (CallSearch(least=0.5), ["m0"]),
        (CallSearch(most=0.5), ["m1"]),
        (CallSearch(metric="helpful"), ["m2", "m1"]),
        (CallSearch(metric="helpful", least=0.6), ["m1"]),
        (CallSearch(metric="helpful", most=0.6), ["m2"]),
        (CallSearch(tag="team"), ["m1", "m0"]),
        (CallSearch(tag="team=sales"), ["m0"]),
        (CallSearch(tag="team=sales' OR 1=1"), []),
        (CallSearch(version=16), ["m3", "m2"]),
        (CallSearch(state="labelled"), ["m1", "m0"]),
        (CallSearch(key="bar"), ["m3"]),
        (CallSearch(since=START + 60, until=START + 120), ["m2", "m1"]),
        (CallSearch(metric="helpful", tag="team", version=8), ["m1"]),
    ],
)
def test_calls_are_found_by_each_field(engine: Engine, search: CallSearch, found: list[str]) -> None:
    assert [call["msg_id"] for call in find_calls(engine, search, 10)] == found
    assert [row["msg_id"] for row in dataset_rows(engine, search)] == found
    assert sum(each.calls for each in usage_by_key(engine, search)) == len(found)


@pytest.mark.parametrize(
    ("tag", "found"),
    [
        ("beta=true", ["m0"]),
        ("beta=false", ["m1"]),
        ("beta=1", ["m2"]),
        ("beta", ["m2", "m1", "m0"]),
        ('the "new" shop=x=y', ["m0"]),
        ('the "new" shop', ["m0"]),
        ("größe=1.5", ["m1"]),
        ("nothing", []),
        ('" OR 1=1', []),
    ],
)
def test_tags_are_found_as_they_are_shown(engine: Engine, tag: str, found: list[str]) -> None:
    store = TrafficStore(engine)
    given = [{"beta": True, 'the "new" shop': "x=y", "nothing": None}, {"beta": False, "größe": 1.5}, {"beta": 1}]
    for number, tags in enumerate(given):
        store.give_feedback(NewFeedback(f"t{number}", [f"m{number}"], 0.5, metric="helpful", tenant="shop", tags=tags))
    assert [call["msg_id"] for call in find_calls(engine, CallSearch(tag=tag), 10)] == found


def test_calls_have_their_metrics_and_keys_their_tokens(engine: Engine) -> None:
    (call,) = find_calls(engine, CallSearch(metric="helpful", least=0.6), 10)
    assert call["metrics"] == {"reward": 0.25, "helpful": 0.9} and call["tags"] == {"team": "support"}
    assert usage_by_key(engine, CallSearch()) == [KeyUsage("shop", 3, 33), KeyUsage("bar", 1, 13)]
    assert [call["msg_id"] for call in find_calls(engine, CallSearch(), 2, 1)] == ["m2", "m1"]


def test_a_dataset_has_conversations_and_no_erased_call(engine: Engine) -> None:
    rows = list(dataset_rows(engine, CallSearch(version=8)))
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "user", "assistant"]
    assert rows[0]["messages"][-1] == {"role": "assistant", "content": "Sent 1."} and rows[0]["tools"] is None
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE calls SET model_call = '{}' WHERE msg_id = 'm1'")
    assert [row["msg_id"] for row in dataset_rows(engine, CallSearch(version=8))] == ["m0"]
