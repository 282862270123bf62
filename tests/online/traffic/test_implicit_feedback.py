"""The next message of a user rewards the previous answer, through a judge model, unless somebody rated it."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from rft_platform.common.errors import JudgeUnavailableError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.config.schema.reward_formula import RewardFormula
from rft_platform.config.schema.service import ImplicitFeedback
from rft_platform.judging.llm.asking import InvalidAnswerError
from rft_platform.judging.llm.judges import read_verdict
from rft_platform.online.project import project_in
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.implicit_feedback import ImplicitRewards, unjudged_reactions
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.store import TrafficStore
from tests.judging.conftest import JudgeServer


def say(prompt: str) -> str:
    reaction = prompt.split("<next_message>\n")[1].split("\n</next_message>")[0]
    verdict = "yes" if "thanks" in reaction else "no" if "wrong" in reaction else "unclear"
    return json.dumps({"reason": "the user says so", "satisfied": verdict})


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    import threading

    made = JudgeServer(say)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


class Chat:
    """A recorded conversation."""

    def __init__(self, store: TrafficStore, name: str, **place: str) -> None:
        self._store, self._name, self._place = store, name, place
        self._messages: list[dict[str, Any]] = []

    def turn(self, user: str, answer: str, role: str = "user", choices: int = 1) -> str:
        """Record a call; returns its id."""
        self._messages.append({"role": role, "content": user})
        msg_id = f"{self._name}-{len(self._messages)}"
        texts = [answer, *(f"another answer {number}" for number in range(1, choices))]
        self._store.record(
            NewCall(
                msg_id, choice,
                {"messages": list(self._messages), "tools": [], "response": {"role": "assistant", "content": text}},
                0, 5, time.time(), conversation=self._name, **self._place,
            ) for choice, text in enumerate(texts)
        )  # fmt: skip
        self._messages.append({"role": "assistant", "content": answer})
        return msg_id


@pytest.fixture
def engine(database_url: str):
    return open_database(database_url)


@pytest.fixture
def store(engine) -> TrafficStore:
    return TrafficStore(engine)


def rewards(tmp_path: Path, engine, store: TrafficStore, server: JudgeServer) -> ImplicitRewards:
    config = build_config({"buffer": {"trainer_input": {"experience_buffer": {"storage_type": "sql"}}}})
    settings = ImplicitFeedback(base_url=server.model["base_url"], model="grader")
    return ImplicitRewards(project_in(Home(tmp_path / "home"), config), engine, store, settings)


def test_a_reaction_rewards_the_answer_before_it(tmp_path, engine, store, server) -> None:
    implicit = rewards(tmp_path, engine, store, server)
    good, bad, odd = (Chat(store, name, tenant="shop") for name in ("good", "bad", "odd"))
    first = [good.turn("What is 12*7?", "84"), bad.turn("What is 12*7?", "74"), odd.turn("What is 12*7?", "84")]
    assert implicit.judge_waiting() == 0, "nobody has reacted yet"
    good.turn("thanks, and 12*8?", "96")
    bad.turn("that is wrong", "Sorry, 84")
    odd.turn("hm", "?")
    assert implicit.judge_waiting() == 3
    calls = {call.msg_id: (call.state, call.reward) for call in store.calls(first)}
    assert calls == {"good-1": ("labelled", 1.0), "bad-1": ("labelled", 0.0), "odd-1": ("recorded", None)}
    assert (implicit.judge_waiting(), server.calls) == (0, 3), "each reaction is judged once"
    assert implicit.metrics() == {"implicit_rewards": 2, "implicit_unclear": 1, "implicit_failures": 0}
    prompt = server.requests[0]["messages"][-1]["content"]
    assert "<question>\nWhat is 12*7?\n</question>" in prompt


def test_a_rating_by_a_person_wins(engine, store, tmp_path, server) -> None:
    chat = Chat(store, "c")
    rated, late = chat.turn("What is 12*7?", "74"), chat.turn("thanks", "You are welcome")
    chat.turn("thanks again", "Bye")
    store.give_feedback(NewFeedback("f1", [rated], 0.2))
    implicit = rewards(tmp_path, engine, store, server)
    assert implicit.judge_waiting() == 1
    store.give_feedback(NewFeedback("x", [rated], 1.0, only_unlabelled=True))
    store.give_feedback(NewFeedback("f2", [late], 0.3))
    assert {call.msg_id: call.reward for call in store.calls([rated, late])} == {rated: 0.2, late: 0.3}


def test_what_is_no_reaction_is_not_judged(engine, store, tmp_path, server) -> None:
    tools, edited, several = (Chat(store, name) for name in ("tools", "edited", "several"))
    tools.turn("Look it up", "I look it up")
    tools.turn("found", "It is 84", role="tool")
    edited.turn("What is 12*7?", "84")
    edited._messages[-1] = {"role": "assistant", "content": "something else"}
    edited.turn("thanks", "You are welcome")
    several.turn("What is 12*7?", "84", choices=2)
    several.turn("thanks", "You are welcome")
    implicit = rewards(tmp_path, engine, store, server)
    assert implicit.judge_waiting() == 4
    assert implicit.judge_waiting() == 0
    assert server.calls == 1
    assert [call.reward for call in store.calls(["several-1"])] == [1.0, None], "the choice that the user saw"


def test_a_model_that_does_not_answer_is_retried_later(engine, store, tmp_path, server) -> None:
    chat = Chat(store, "c")
    chat.turn("What is 12*7?", "84")
    chat.turn("thanks", "You are welcome")
    implicit = rewards(tmp_path, engine, store, server)
    implicit._judge = implicit._judge.model_copy(update={"retries": 0})
    server.failures = [500]
    with pytest.raises(JudgeUnavailableError):
        implicit.judge_waiting()
    assert implicit.judge_waiting() == 1
    assert [call.reward for call in store.calls(["c-1"])] == [1.0]
    assert unjudged_reactions(engine, time.time() + 10, 5) == []


def test_a_verdict_with_a_used_id_is_not_requested_for_ever(engine, store, tmp_path, server) -> None:
    chat = Chat(store, "c")
    chat.turn("What is 12*7?", "84")
    chat.turn("thanks", "You are welcome")
    store.give_feedback(NewFeedback("implicit-c-1-0", ["c-1"], None, comment="the id is taken"))
    assert rewards(tmp_path, engine, store, server).judge_waiting() == 0
    assert server.calls == 1


def test_calls_before_the_window_are_not_read(tmp_path, server) -> None:
    engine, statements = open_database(f"sqlite:///{tmp_path / 'traffic.db'}"), list[tuple[str, Any]]()
    chat = Chat(TrafficStore(engine), "c")
    chat.turn("What is 12*7?", "84")
    chat.turn("thanks", "You are welcome")
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2:4]))
    assert [each.msg_id for each in unjudged_reactions(engine, time.time() - 10, 5)] == ["c-1"]
    text, values = next(each for each in statements if "EXISTS" in each[0])
    with engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all()
    assert "SEARCH calls USING INDEX calls_state (state=? AND number>?)" in [step[3] for step in plan]


def test_only_verdicts_are_read() -> None:
    assert read_verdict('I think {"reason": "x", "satisfied": "yes"}') == 1.0
    assert read_verdict('{"satisfied": "unclear"}') is None
    with pytest.raises(InvalidAnswerError, match="satisfied"):
        read_verdict('{"satisfied": "maybe"}')


def test_answers_that_wait_for_other_metrics_are_judged_once_and_starve_no_older_ones(tmp_path, engine, server) -> None:
    store = TrafficStore(engine, train_on=RewardFormula.parse("0.75*reward + 0.25*helpful"))
    implicit, answers = rewards(tmp_path, engine, store, server), []
    for number in range(40):  # more than are judged together
        chat = Chat(store, f"c{number}")
        answers.append(chat.turn("What is 12*7?", "84"))
        chat.turn("thanks", "You are welcome")
    store.give_feedback(NewFeedback("p", answers[-1:], 0.5))
    store.give_feedback(NewFeedback("c", answers[:1], None, comment="no reward"))
    while implicit.judge_waiting():
        pass
    assert implicit.judge_waiting() == 0
    assert len(server.requests) == implicit.metrics()["implicit_rewards"] == 39
    assert {call.state for call in store.calls(answers)} == {"recorded"}
    store.give_feedback(NewFeedback("h", answers, 1.0, metric="helpful"))
    assert [call.reward for call in store.calls(answers)] == [1.0] * 39 + [0.625]


def test_a_verdict_that_is_stored_already_is_not_counted(tmp_path, engine, store, server) -> None:
    implicit, chat = rewards(tmp_path, engine, store, server), Chat(store, "c")
    chat.turn("What is 12*7?", "84")
    chat.turn("thanks", "You are welcome")
    found = unjudged_reactions(engine, 0, 32)
    assert [asyncio.run(implicit._judge_all(found)) for _ in range(2)] == [1, 0]
    assert implicit.metrics()["implicit_rewards"] == 1
