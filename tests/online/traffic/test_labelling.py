"""Rewards by a formula over several metrics of feedback."""

from pathlib import Path

import pytest
from sqlalchemy import Engine

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.config.schema.reward_formula import RewardFormula
from rft_platform.online.project import project_in
from rft_platform.online.traffic.database import COMMITTED, LABELLED, RECORDED, open_database
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.online.traffic.store import TrafficStore

FORMULA = RewardFormula.parse("0.75*solved + 0.25*helpful")


@pytest.fixture
def engine(database_url: str) -> Engine:
    return open_database(database_url)


@pytest.fixture
def store(engine: Engine) -> TrafficStore:
    store = TrafficStore(engine, train_on=FORMULA)
    store.record(NewCall(f"m{number}", 0, {"messages": []}, 4, 5, 100.0) for number in range(3))
    return store


def test_a_call_has_a_reward_when_it_has_every_metric(store: TrafficStore) -> None:
    store.give_feedback(NewFeedback("a", ["m0", "m1"], 1.0, metric="solved"))
    store.give_feedback(NewFeedback("b", ["m0", "m2"], 1.0))  # the reward is not in the formula
    assert [call.state for call in store.calls(["m0", "m1", "m2"])] == [RECORDED] * 3
    store.give_feedback(NewFeedback("c", ["m0"], 0.5, metric="helpful"))
    first, second, third = store.calls(["m0", "m1", "m2"])
    assert (first.state, first.reward, first.task_id is not None) == (LABELLED, 0.875, True)
    assert (second.state, second.reward, third.state) == (RECORDED, None, RECORDED)


def test_a_later_value_replaces_an_earlier_one_until_the_commit(store: TrafficStore) -> None:
    store.give_feedback(NewFeedback("a", ["m0"], 1.0, metric="solved"))
    store.give_feedback(NewFeedback("b", ["m0"], 0.0, metric="helpful"))
    store.give_feedback(NewFeedback("c", ["m0"], 1.0, metric="helpful"))
    assert store.calls(["m0"])[0].reward == 1.0
    assert store.give_feedback(NewFeedback("c", ["m0"], 1.0, metric="helpful")).duplicate == 1
    assert store.commit().committed == 1
    store.give_feedback(NewFeedback("d", ["m0"], 0.0, metric="solved"))
    call = store.calls(["m0"])[0]
    assert (call.state, call.reward) == (COMMITTED, 1.0)


def test_a_metric_of_the_formula_must_name_the_choice(engine: Engine) -> None:
    store = TrafficStore(engine, train_on=FORMULA)
    store.record(NewCall("m", choice, {"messages": []}, 4, 5, 100.0) for choice in range(2))
    with pytest.raises(UserError, match="has 2 choices"):
        store.give_feedback(NewFeedback("a", ["m"], 1.0, metric="solved"))
    store.give_feedback(NewFeedback("b", ["m"], 1.0))  # does not train
    store.give_feedback(NewFeedback("c", ["m"], 1.0, metric="solved", choice=1))
    store.give_feedback(NewFeedback("d", ["m"], 1.0, metric="helpful", choice=1))
    assert [call.reward for call in store.calls(["m"])] == [None, 1.0]


def test_the_store_of_a_project_takes_the_configured_formula(tmp_path: Path) -> None:
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    service = {"train_on": "1 - solved", "metrics": [{"name": "solved", "type": "boolean"}]}
    config = {"model": {"model_path": "m", "max_model_len": 64}, "algorithm": {"algorithm_type": "reinforce++"},
              "buffer": buffer, "service": service}  # fmt: skip
    store = traffic_store(project_in(Home(tmp_path / "home"), build_config(config)))
    store.record([NewCall("m", 0, {"messages": []}, 4, 5, 100.0)])
    store.give_feedback(NewFeedback("a", ["m"], 0.0, metric="solved"))
    assert store.calls(["m"])[0].reward == 1.0


@pytest.mark.parametrize("implicit_first", [True, False])
def test_an_implicit_value_counts_only_without_a_persons_value(engine: Engine, implicit_first: bool) -> None:
    store = TrafficStore(engine, train_on=RewardFormula.parse("0.75*reward + 0.25*helpful"))
    store.record([NewCall("m", 0, {"messages": []}, 4, 5, 100.0), NewCall("n", 0, {"messages": []}, 4, 5, 100.0)])
    judged = NewFeedback("j", ["m", "n"], 0.0, only_unlabelled=True, tags={"source": "implicit"})
    rated = NewFeedback("p", ["m"], 1.0, tags={"source": "phone"})
    for each in (judged, rated) if implicit_first else (rated, judged):
        store.give_feedback(each)
    store.give_feedback(NewFeedback("h", ["m", "n"], 1.0, metric="helpful"))
    assert [call.reward for call in store.calls(["m", "n"])] == [1.0, 0.25]
    store.give_feedback(NewFeedback("p2", ["n"], 1.0))
    assert store.calls(["n"])[0].reward == 1.0


def test_an_implicit_value_that_comes_last_leaves_the_persons(engine: Engine) -> None:
    store = TrafficStore(engine, train_on=RewardFormula.parse("0.75*reward + 0.25*helpful"))
    store.record([NewCall("m", 0, {"messages": []}, 4, 5, 100.0)])
    store.give_feedback(NewFeedback("p", ["m"], 1.0))
    store.give_feedback(NewFeedback("h", ["m"], 1.0, metric="helpful"))
    store.give_feedback(NewFeedback("j", ["m"], 0.0, tags={"source": "implicit"}))
    assert store.calls(["m"])[0].reward == 1.0
