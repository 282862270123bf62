"""The clients against the real service: chat, feedback, late feedback, commits at exit."""

import openai
import pytest

from rft_platform.common.errors import UserError
from rft_platform.online import AsyncOnlineClient, Metric, OnlineClient, UnknownAnswersError

QUESTION = [{"role": "user", "content": "What is 12*7?"}]


def ask(client: OnlineClient) -> str:
    return client.chat.completions.create(model="policy", messages=QUESTION, max_tokens=4).id


def test_the_end_of_the_block_commits(service) -> None:
    with OnlineClient(service.url, metrics=[Metric("helpful", max=5)]) as client:
        msg_id = ask(client)
        done = client.feedback(msg_id, reward=1.0, metrics={"helpful": 5}, comment="good", feedback_id="f1")
        assert (done.matched, done.duplicate, done.late, done.unknown) == (1, 0, 0, ())
        assert client.feedback(msg_id, reward=0.0, feedback_id="f1").duplicate == 1, "a repeated id changes nothing"
    (row,) = service.store.settle(1)
    assert row.reward == 1.0
    with OnlineClient(service.url) as client:
        assert client.feedback(msg_id, reward=0.0).late == 1
        with pytest.raises(UnknownAnswersError, match="chatcmpl-none"):
            client.feedback("chatcmpl-none", reward=1.0)


def test_a_run_has_its_calls_and_one_reward(service) -> None:
    with OnlineClient(f"{service.url}/v1") as client:
        run = client.run("t1", "0", subject="ann")
        ask(run)
        list(run.chat.completions.create(model="policy", messages=QUESTION, max_tokens=4, stream=True))
        assert run.feedback(reward=0.5).matched == 2
        assert client.commit(task_id="other").committed == 0
        assert client.commit(task_id="t1", run_id="0").committed == 2
    assert {(row.task_id, row.run_id, row.subject, row.reward) for row in service.store.settle(1)} == {
        ("t1", "0", "ann", 0.5)
    }


def test_a_block_that_fails_commits_what_was_rated(service) -> None:
    with pytest.raises(ZeroDivisionError), OnlineClient(service.url) as client:
        client.feedback(ask(client), reward=1.0)
        _ = 1 / 0
    assert len(service.store.settle(1)) == 1


async def test_the_asynchronous_client(service) -> None:
    async with AsyncOnlineClient(service.url) as client:
        run = client.run(conversation_id="c")
        answer = await run.chat.completions.create(model="policy", messages=QUESTION, max_tokens=4)
        assert (await run.feedback(reward=1.0)).matched == 1
        assert (await client.feedback(answer, reward=0.25)).matched == 1, "a later reward replaces the first"
        with pytest.raises(UnknownAnswersError):
            await client.feedback(["nothing"], reward=1.0)
    (row,) = service.store.settle(1)
    assert (row.reward, row.conversation) == (0.25, "c")


def test_wrong_addresses_and_names_are_refused(service) -> None:
    with pytest.raises(UserError, match="base_url"):
        OnlineClient("127.0.0.1:8010")
    client = OnlineClient(service.url)
    with pytest.raises(UserError, match="ASCII"):
        client.run("Aufgabe ä")
    client.close()
    with pytest.raises(openai.APIConnectionError), OnlineClient("http://127.0.0.1:9", max_retries=0):
        pass
