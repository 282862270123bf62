"""The writer: in order, in groups, with bounded memory, through failures of the database."""

import asyncio
import threading

import pytest
from sqlalchemy.exc import DataError, OperationalError

from rft_platform.common.errors import StorageError
from rft_platform.common.personal_data import Redaction
from rft_platform.online.traffic.database import DatabaseUnavailableError, open_database
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.online.traffic.writer import TrafficWriter


def call(number: int) -> NewCall:
    return NewCall(f"m{number}", 0, {"n": number}, 1, 5, 0.0)


@pytest.fixture
def store(tmp_path) -> TrafficStore:
    return TrafficStore(open_database(f"sqlite:///{tmp_path / 'traffic.db'}"))


async def test_feedback_finds_the_call_that_was_recorded_just_before(store) -> None:
    writer = TrafficWriter(store)
    for number in range(500):
        assert writer.record(call(number))
    result = await writer.run(lambda each: each.give_feedback(NewFeedback("f", ["m499"], 1.0)))
    assert result.matched == 1
    assert writer.close() == 0
    assert store.counts()["recorded"] == 499


async def test_a_full_queue_drops_and_counts(store) -> None:
    writer, blocked = TrafficWriter(store, most_waiting=3), threading.Event()
    store.insert = lambda rows: blocked.wait()  # type: ignore[method-assign]
    taken = [writer.record(call(number)) for number in range(5)]
    assert taken == [True] * 3 + [False] * 2
    assert writer.counts.dropped == 2
    blocked.set()
    writer.close()


async def test_a_temporary_database_failure_loses_no_call(store) -> None:
    writer, real, failing = TrafficWriter(store), store.insert, threading.Event()

    def insert(rows):
        if not failing.is_set():
            raise OperationalError("insert", {}, Exception("database or disk is full"))
        return real(rows)

    store.insert = insert  # type: ignore[method-assign]
    for number in range(10):
        writer.record(call(number))
    await asyncio.sleep(0.3)
    assert writer.counts.failures >= 1
    failing.set()
    assert (await writer.run(lambda each: each.counts()))["recorded"] == 10
    assert writer.counts.recorded == 10
    writer.close()


async def test_a_call_is_redacted_once_however_often_its_transaction_is_repeated(tmp_path) -> None:
    redaction = Redaction(lambda text: "[removed]")
    store = TrafficStore(open_database(f"sqlite:///{tmp_path / 'traffic.db'}"), redaction=redaction)
    writer, real, tries = TrafficWriter(store), store.insert, iter(range(10))

    def insert(rows):
        if next(tries) < 2:
            raise OperationalError("insert", {}, Exception("database or disk is full"))
        return real(rows)

    store.insert = insert  # type: ignore[method-assign]
    messages = [{"role": "user", "content": "my name is Ann"}]
    writer.record(NewCall("m", 0, {"messages": messages}, 1, 5, 0.0))
    assert (await writer.run(lambda each: each.counts()))["untrainable"] == 1
    writer.close()
    assert (writer.counts.failures, redaction.calls) == (2, 1)


async def test_a_request_that_waits_too_long_is_refused(store) -> None:
    writer, blocked = TrafficWriter(store), threading.Event()
    waiting = writer.run(lambda each: blocked.wait(), timeout_s=0.1)
    with pytest.raises(StorageError, match=r"did not answer within 0\.1 s"):
        await waiting
    blocked.set()
    writer.close()
    with pytest.raises(StorageError, match="stopping"):
        await writer.run(lambda each: None)


async def test_a_request_without_a_waiting_caller_is_withdrawn(store) -> None:
    writer, blocked, called = TrafficWriter(store), threading.Event(), threading.Event()
    first = asyncio.create_task(writer.run(lambda each: blocked.wait()))
    await asyncio.sleep(0.05)
    with pytest.raises(DatabaseUnavailableError):
        await writer.run(lambda each: called.set(), timeout_s=0.05)
    assert writer.waiting == 0
    blocked.set()
    await first
    await writer.run(lambda each: None)
    assert not called.is_set()
    writer.close()


async def test_a_call_that_the_database_refuses_is_dropped_alone(store) -> None:
    writer, real, blocked = TrafficWriter(store), store.insert, threading.Event()

    def insert(rows):
        if any(row["msg_id"] == "m3" for row in rows):
            raise DataError("insert", {}, Exception("unsupported Unicode escape sequence"))
        return real(rows)

    store.insert = insert  # type: ignore[method-assign]
    first = asyncio.create_task(writer.run(lambda each: blocked.wait()))
    await asyncio.sleep(0.05)
    for number in range(6):
        writer.record(call(number))
    blocked.set()
    await first
    assert (await writer.run(lambda each: each.counts()))["recorded"] == 5
    assert (writer.counts.recorded, writer.counts.dropped, writer.waiting) == (5, 1, 0)
    writer.close()


async def test_calls_are_written_in_groups_and_a_request_does_not_wait_for_them(store) -> None:
    writer, groups, real = TrafficWriter(store), list[int](), store.insert
    store.insert = lambda rows: groups.append(len(rows)) or real(rows)  # type: ignore[method-assign]
    for number in range(50):
        writer.record(call(number))
    assert (await writer.run(lambda each: each.counts()))["recorded"] == 50
    assert len(groups) <= 2
    writer.record(call(50))
    await asyncio.sleep(0.5)  # nobody waits for it: it is written nevertheless
    assert store.counts()["recorded"] == 51
    writer.close()
