"""Requests of agents over several replicas: each is answered once, by whoever answers."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.pool.replicas import Replica, Replicas
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.httpx_compat import wire

from .fake_engine import FakeEngine, answer_to, render

MESSAGES: Any = [{"role": "user", "content": "2+2?"}]
Fakes = list[FakeEngine]


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    """Two engines."""
    engines = [FakeEngine(), FakeEngine()]
    for fake in engines:
        fake.serve()
    yield engines
    for fake in engines:
        fake.shutdown()


@pytest.fixture
def replicas(fakes: Fakes) -> Replicas:
    """The table of them."""
    return table_of([fake.base_url for fake in fakes])


def table_of(urls: list[str]) -> Replicas:
    return Replicas([Replica(number, EngineClient(url)) for number, url in enumerate(urls)], {})


def new_history() -> RunHistory:
    return RunHistory("fake-model", SamplingParams(64, temperature=0.7), seed=1)


async def ask(replicas: Replicas, history: RunHistory, blocking: bool = False, **options: Any) -> Any:
    """One chat call by its own client."""
    clients = RecordingClients("http://127.0.0.1:1/v1", 30, replicas)
    if blocking:
        with clients.sync_client(history) as sync:
            return await asyncio.to_thread(sync.chat.completions.create, model="m", messages=MESSAGES, **options)
    async with clients.async_client(history) as client:
        return await client.chat.completions.create(model="m", messages=MESSAGES, **options)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_lost_connection_moves_the_request(fakes: Fakes, replicas: Replicas, blocking: bool) -> None:
    fakes[0].shutdown()
    histories = [new_history() for _ in range(4)]
    for history in histories:
        answer = await ask(replicas, history, blocking)
        (call,) = history.calls()
        assert call.msg_id == answer.id
        assert call.response["content"] == answer_to(render(MESSAGES), history.call_seed(0), 0)
        assert history.client_retries == 0 and not history.connection_lost
    assert len(fakes[1].chat_requests) == 4
    assert "does not answer" in replicas.down()[0]
    assert [replica.outstanding for replica in replicas.serving()] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_replica_that_is_unavailable_is_passed_over(fakes: Fakes, replicas: Replicas, blocking: bool) -> None:
    fakes[0].refuse_next = 1
    history = new_history()
    await ask(replicas, history, blocking)
    assert len(history.calls()) == 1 and history.client_retries == 0
    assert replicas.down() == {0: f"{fakes[0].base_url[:-3]} answers 503"}
    fakes[1].refuse_next = 10
    with pytest.raises(openai.APIError):
        await ask(replicas, new_history(), blocking)


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_call_fails_if_no_replica_answers(fakes: Fakes, replicas: Replicas, blocking: bool) -> None:
    for fake in fakes:
        fake.shutdown()
    history = new_history()
    with pytest.raises(openai.APIConnectionError):
        await ask(replicas, history, blocking)
    assert history.connection_lost and history.calls() == []
    assert sorted(replicas.down()) == [0, 1]


@pytest.mark.slow
async def test_runs_are_shared_out_and_stay(fakes: Fakes, replicas: Replicas) -> None:
    clients = RecordingClients(fakes[0].base_url, 30, replicas)

    async def run(number: int) -> None:
        async with clients.async_client(new_history()) as client:
            for turn in range(4):
                content = f"run {number}, turn {turn}"
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])

    for number in range(6):  # one after the other: no replica is ever busier than the other
        await run(number)
    runs = [{body["messages"][0]["content"].partition(",")[0] for body in fake.chat_requests} for fake in fakes]
    assert runs == [{"run 0", "run 2", "run 4"}, {"run 1", "run 3", "run 5"}]
    await asyncio.gather(*map(run, range(6, 40)))
    counts = [len(fake.chat_requests) for fake in fakes]
    assert sum(counts) == 40 * 4 and abs(counts[0] - counts[1]) <= 40
    assert [replica.outstanding for replica in replicas.serving()] == [0, 0]


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_streamed_answer_keeps_its_replica_busy_until_it_ends(replicas: Replicas, blocking: bool) -> None:
    history = new_history()
    clients = RecordingClients("http://127.0.0.1:1/v1", 30, replicas)
    if blocking:
        sync = clients.sync_client(history)
        stream = await asyncio.to_thread(sync.chat.completions.create, model="m", messages=MESSAGES, stream=True)
        assert sum(replica.outstanding > 0 for replica in replicas.serving()) == 1
        chunks = await asyncio.to_thread(list, stream)
        sync.close()
    else:
        async with clients.async_client(history) as client:
            answer = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            assert sum(replica.outstanding > 0 for replica in replicas.serving()) == 1
            chunks = [chunk async for chunk in answer]
    assert len(history.calls()) == 1 and len(chunks) > 1
    assert [replica.outstanding for replica in replicas.serving()] == [0, 0]


@contextmanager
def breaking_stream() -> Iterator[str]:
    """URL of a server that begins to stream an answer and goes away in the middle of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        event = b'data: {"id": "a", "choices": []}\n\n'
        connection.sendall(head + f"{len(event):x}\r\n".encode() + event + b"\r\n")
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


async def test_a_stream_that_breaks_off_is_an_error_and_no_row(fakes: Fakes) -> None:
    with breaking_stream() as url:
        replicas = table_of([url, fakes[1].base_url])
        history = new_history()
        async with RecordingClients("http://127.0.0.1:1/v1", 30, replicas).async_client(history) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            # how the end of a connection is told depends on whether something was still unread: both are a loss
            with pytest.raises((openai.APIConnectionError, wire.NetworkError, wire.RemoteProtocolError)):
                async for _ in stream:
                    pass
    assert history.calls() == [] and list(replicas.down()) == [0]
    assert [replica.outstanding for replica in replicas.serving()] == [0]
