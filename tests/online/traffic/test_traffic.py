"""Production traffic in the database: every step is kept, repeated steps change nothing, groups stay whole."""

import sqlite3
import threading
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from rft_platform.common.errors import StorageError, UserError
from rft_platform.config.schema.reward_formula import RewardFormula
from rft_platform.experience.record import ModelCall
from rft_platform.online.traffic import database
from rft_platform.online.traffic.database import open_database
from rft_platform.online.traffic.erasure import Person, TrafficErasure
from rft_platform.online.traffic.incoming import NewCall, NewFeedback
from rft_platform.online.traffic.round_rows import RoundRule, rows_of_traffic
from rft_platform.online.traffic.store import (
    CommitResult,
    FeedbackResult,
    ReusedFeedbackIdError,
    TrafficStore,
    many_stale,
)

RECORDED = {
    "msg_id": "a", "policy_version": 3, "prompt_ids": [1], "response_ids": [2], "rollout_logprobs": [-0.5],
    "finish_reason": "stop", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "messages": [], "tools": [],
    "response": {"role": "assistant", "content": "x"}, "created_at": 0.0, "duration_s": 0.1,
}  # fmt: skip


@pytest.fixture
def url(database_url: str) -> str:
    return database_url


@pytest.fixture
def store(url, clock) -> TrafficStore:
    return TrafficStore(open_database(url), clock)


def call(msg_id: str, **changes) -> NewCall:
    given = {"choice": 0, "model_call": {"text": msg_id}, "policy_version": 3, "tokens": 7, "recorded_at": 1_000_000.0}
    return NewCall(msg_id=msg_id, **(given | changes))


def feedback(name: str, *msg_ids: str, value: float | None = 1.0, **changes) -> NewFeedback:
    return NewFeedback(feedback_id=name, msg_ids=msg_ids, value=value, **changes)


def test_rows_go_from_recorded_to_consumed(store) -> None:
    assert store.record([call("a"), call("b"), call("c")]) == 3
    assert store.give_feedback(feedback("f1", "a", "b", value=0.5)) == FeedbackResult(matched=2)
    assert store.commit() == CommitResult(committed=2)
    assert store.next_choice().waiting == 2
    rows = store.settle(1)
    assert [(row.msg_id, row.reward, row.model_call) for row in rows] == [
        ("a", 0.5, {"text": "a"}), ("b", 0.5, {"text": "b"}),
    ]  # fmt: skip
    assert len({row.run_id for row in rows}) == 1
    assert store.next_choice().waiting == 0
    assert store.consume(1) == 2
    assert store.counts() == {
        "recorded": 1, "labelled": 0, "committed": 0, "consumed": 2, "untrainable": 0, "stale": 0, "expired": 0,
        "forgotten": 0,
    }  # fmt: skip


def test_repeated_steps_change_nothing(store) -> None:
    assert store.record([call("a")]) == 1
    assert store.record([call("a")]) == 0
    assert store.give_feedback(feedback("f1", "a")) == FeedbackResult(matched=1)
    assert store.give_feedback(feedback("f1", "a")) == FeedbackResult(duplicate=1)
    store.commit()
    assert [row.reward for row in store.settle(1)] == [1.0]
    store.record([call("b")])
    store.give_feedback(feedback("f2", "b"))
    store.commit()
    assert [row.msg_id for row in store.settle(1)] == ["a"]  # settled before b was committed
    assert store.consume(1) == 1
    assert store.consume(1) == 0
    assert [row.msg_id for row in store.settle(2)] == ["b"]


def test_a_later_reward_replaces_an_earlier_one_until_the_row_is_committed(store) -> None:
    store.record([call("a")])
    store.give_feedback(feedback("f1", "a", value=1.0))
    assert store.give_feedback(feedback("f2", "a", value=0.0)) == FeedbackResult(matched=1)
    store.commit()
    assert store.give_feedback(feedback("f3", "a", value=1.0)) == FeedbackResult(late=1)
    assert [row.reward for row in store.settle(1)] == [0.0]


def test_unknown_messages_are_reported_and_a_feedback_on_nothing_is_not_kept(store) -> None:
    store.record([call("a")])
    assert store.give_feedback(feedback("f1", "a", "lost")) == FeedbackResult(matched=1, unknown=("lost",))
    assert store.give_feedback(feedback("f2", "lost")) == FeedbackResult(unknown=("lost",))
    store.record([call("lost")])
    assert store.give_feedback(feedback("f2", "lost")) == FeedbackResult(matched=1)


def test_a_comment_labels_nothing(store) -> None:
    store.record([call("a")])
    assert store.give_feedback(feedback("f1", "a", value=None, comment="too long")) == FeedbackResult(matched=1)
    assert store.commit() == CommitResult()


def test_a_tenant_cannot_label_the_calls_of_another(store) -> None:
    store.record([call("a", tenant="one")])
    assert store.give_feedback(feedback("f1", "a", tenant="two")) == FeedbackResult(unknown=("a",))


def test_a_group_waits_for_its_runs_or_its_deadline(store, clock) -> None:
    for number in range(3):
        store.record([call(f"a{number}"), call(f"b{number}")])
    for number in range(2):
        store.give_feedback(feedback(f"fa{number}", f"a{number}", task_id="a", run_id=str(number)))
    store.give_feedback(feedback("fb", "b0", task_id="b", run_id="0"))
    assert store.commit(group_size=3) == CommitResult(committed=0, pending_groups=2)
    store.give_feedback(feedback("fa2", "a2", task_id="a", run_id="2"))
    assert store.commit(group_size=3) == CommitResult(committed=3, pending_groups=1)
    clock.now += 3601
    assert store.commit(group_size=3) == CommitResult(committed=1)


def test_a_commit_is_restricted_to_its_scope(store, clock) -> None:
    store.record([call("a"), call("b"), call("c")])
    store.give_feedback(feedback("fa", "a", task_id="t", run_id="0"))
    store.give_feedback(feedback("fb", "b", task_id="t", run_id="1"))
    assert store.commit(task_id="other") == CommitResult()
    assert store.commit(task_id="t", run_id="1") == CommitResult(committed=1)
    clock.now += 60
    assert store.commit(max_age_s=30) == CommitResult()
    assert store.commit(max_age_s=90) == CommitResult(committed=1)


@pytest.mark.parametrize("scope", [{"run_id": "0"}, {"max_age_s": 30}])
def test_a_restricted_commit_splits_no_group(store, clock, scope) -> None:
    store.record([call("a0"), call("a1"), call("b1")])
    store.give_feedback(feedback("fa1", "a1", task_id="a", run_id="1"))
    store.give_feedback(feedback("fb1", "b1", task_id="b", run_id="1"))
    clock.now += 60
    assert store.commit(group_size=2, **scope) == CommitResult()
    store.give_feedback(feedback("fa0", "a0", task_id="a", run_id="0"))
    assert store.commit(group_size=2, **scope) == CommitResult(committed=2)
    assert {row.msg_id for row in store.settle(1)} == {"a0", "a1"}


def test_a_restricted_commit_splits_no_run(store, clock) -> None:
    store.record([call("a"), call("b")])
    store.give_feedback(feedback("f1", "a", task_id="t", run_id="0"))
    clock.now += 60
    store.give_feedback(feedback("f2", "b", task_id="t", run_id="0"))
    assert store.commit(max_age_s=30) == CommitResult(committed=2)


def test_a_feedback_on_a_run_of_a_conversation_leaves_the_other_runs(store) -> None:
    store.record(call(run, task_id=f"t{run}", run_id="0", conversation="c") for run in "ab")
    for run, reward in (("a", 1.0), ("b", 0.0)):
        named = {"task_id": f"t{run}", "run_id": "0", "conversation": "c"}
        assert store.give_feedback(feedback(f"f{run}", value=reward, **named)) == FeedbackResult(matched=1)
    assert [each.reward for each in store.calls(["a", "b"])] == [1.0, 0.0]
    elsewhere = feedback("g", task_id="ta", run_id="0", conversation="other")
    assert store.give_feedback(elsewhere) == FeedbackResult()
    assert store.give_feedback(feedback("h", conversation="c", value=0.5)).matched == 2


def test_a_feedback_is_about_one_choice(store) -> None:
    store.record([call("a", choice=number) for number in range(3)])
    assert store.give_feedback(feedback("f1", "a", value=1.0, choice=1)) == FeedbackResult(matched=1)
    assert store.give_feedback(feedback("f2", "a", value=0.0, choice=2)) == FeedbackResult(matched=1)
    assert store.give_feedback(feedback("f3", "a", choice=7)) == FeedbackResult(unknown=("a",))
    assert store.commit(group_size=2) == CommitResult(committed=2)
    rows = store.settle(1)
    assert [(row.choice, row.reward) for row in rows] == [(1, 1.0), (2, 0.0)]
    assert len({row.task_id for row in rows}) == 1, "the choices of an answer are a group"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_erased_text_that_another_process_keeps_open_is_reported(store, url, monkeypatch) -> None:
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_MS", 50)
    engine = open_database(url)
    own, erasure = TrafficStore(engine), TrafficErasure(engine)
    own.record([call("a", subject="ann")])
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN").close()
        other.execute("SELECT COUNT(*) FROM calls").fetchall()
        erasure.forget(Person("ann", b"key"))
        with pytest.raises(StorageError, match="still holds erased text"):
            erasure.compact()
        other.execute("ROLLBACK").close()
    erasure.compact()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_readers_do_not_wait_for_writers(store, url) -> None:
    store.record([call("a")])
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE").close()
        assert store.counts()["recorded"] == 1
        assert [each.msg_id for each in store.calls(["a"])] == ["a"]
        other.execute("ROLLBACK").close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_nothing_is_written_to_a_file_that_was_removed_or_replaced(store, url, tmp_path) -> None:
    store.record([call("a"), call("b")])
    file = Path(url.removeprefix("sqlite:///"))
    kept = tmp_path / "kept"
    kept.mkdir()
    for each in tmp_path.glob("traffic.db*"):
        each.rename(kept / each.name)
    with pytest.raises(OperationalError, match="was removed"):
        store.give_feedback(feedback("f", "a"))
    assert not file.exists()
    for each in kept.iterdir():
        each.rename(tmp_path / each.name)
    assert store.give_feedback(feedback("f", "a")) == FeedbackResult(matched=1)
    file.unlink()
    with pytest.raises(OperationalError, match="was removed"):
        store.give_feedback(feedback("g", "b"))


def test_a_round_takes_whole_tasks(store) -> None:
    store.record([call(f"{task}{number}") for task in "abc" for number in range(3)])
    for task in "abc":
        for number in range(3):
            store.give_feedback(feedback(f"{task}{number}", f"{task}{number}", task_id=task, run_id=str(number)))
    store.commit()
    assert {row.task_id for row in store.settle(1, RoundRule(most_rows=7))} == {"a", "b"}
    assert {row.task_id for row in store.settle(2, RoundRule(most_rows=2))} == {"c"}  # a task is never split


def waiting(store: TrafficStore, rule: RoundRule) -> tuple[int, int]:
    choice = store.next_choice(rule)
    return choice.waiting, len(choice.above_share)


def test_a_subject_has_at_most_its_share_of_a_round_and_keeps_its_other_rows(store) -> None:
    for number in range(8):
        store.record([call(f"loud{number}", subject="loud")])
        store.give_feedback(feedback(f"loud{number}", f"loud{number}"))
    for name in ("ann", "bob", None):
        store.record([call(str(name), subject=name)])
        store.give_feedback(feedback(f"f{name}", str(name)))
    store.commit()
    rule = RoundRule(most_rows=8, subject_share=0.25)
    assert waiting(store, rule) == (5, 6)
    assert sorted(row.subject or "" for row in store.settle(1, rule)) == ["", "ann", "bob", "loud", "loud"]
    assert waiting(store, rule) == (2, 4)
    assert [row.subject for row in store.settle(2, rule)] == ["loud", "loud"]
    assert waiting(store, RoundRule(most_rows=8)) == (4, 0)


def test_rows_above_the_share_become_stale_like_others_and_tenants_have_subjects_of_their_own(store) -> None:
    for tenant in ("shop", "bank"):
        for number in range(2):
            store.record([call(f"{tenant}{number}", subject="ann", tenant=tenant)])
            store.give_feedback(feedback(f"{tenant}{number}", f"{tenant}{number}", tenant=tenant))
    store.commit()
    rule = RoundRule(most_rows=4, subject_share=0.25)
    assert {row.tenant for row in store.settle(1, rule)} == {"shop", "bank"} and many_stale(store.counts()) is None
    assert store.settle(2, RoundRule(most_rows=4, subject_share=0.25, oldest_version=4)) == []
    assert store.counts()["stale"] == 2
    assert "2 of 4 committed rows have become stale so far" in str(many_stale(store.counts()))


def test_a_task_above_a_share_is_left_out_as_a_whole(store) -> None:
    for task, runs in (("a", 3), ("b", 2)):
        store.record([call(f"{task}{number}", subject="ann") for number in range(runs)])
        for number in range(runs):
            given = feedback(f"{task}{number}", f"{task}{number}", task_id=task, run_id=str(number))
            store.give_feedback(given)
    store.commit()
    rule = RoundRule(most_rows=10, subject_share=0.2)
    assert [row.msg_id for row in store.settle(1, rule)] == ["b0", "b1"]
    assert store.settle(2, rule) == []
    assert waiting(store, rule) == (0, 3)


def test_a_feedback_id_belongs_to_one_feedback(store) -> None:
    store.record([call("a"), call("b")])
    given = feedback("ticket-1", "a", request={"msg_ids": ["a"], "reward": 1.0})
    assert store.give_feedback(given) == FeedbackResult(matched=1)
    assert store.give_feedback(given) == FeedbackResult(duplicate=1)
    for changes in (
        {"request": {"msg_ids": ["b"], "reward": 1.0}}, {"value": 0.0}, {"value": None}, {"comment": "x"},
        {"tags": {"a": 1}}, {"metric": "helpful"}, {"correction": "x"},
    ):  # fmt: skip
        with pytest.raises(ReusedFeedbackIdError, match="'ticket-1': another feedback has this id"):
            store.give_feedback(replace(given, **changes))
    with pytest.raises(ReusedFeedbackIdError):
        store.give_feedback(feedback("ticket-1", "b", value=0.0))
    assert [(each.msg_id, each.reward) for each in store.calls(["a", "b"])] == [("a", 1.0), ("b", None)]


def test_a_reward_names_the_choice_of_an_answer_with_several(store) -> None:
    store.record([call("a"), *(call("b", choice=number, conversation="c") for number in range(3))])
    for changes in ({}, {"value": None, "correction": "x"}):
        with pytest.raises(UserError, match=r"the answer b has 3 choices: rate each of them.*choice"):
            store.give_feedback(feedback("f1", "a", "b", **changes))
    with pytest.raises(UserError, match="the answer b has 3 choices"):
        store.give_feedback(feedback("f1", conversation="c"))
    assert store.counts()["recorded"] == 4
    assert store.give_feedback(feedback("f1", "b", value=None, comment="x")) == FeedbackResult(matched=1)
    assert store.give_feedback(feedback("f2", "b", metric="helpful")) == FeedbackResult(matched=1)
    assert store.give_feedback(feedback("f3", "b", choice=2)) == FeedbackResult(matched=1)
    assert [each.reward for each in store.calls(["b"])] == [None, None, 1.0]


def test_the_prompts_of_one_completion_are_tasks_of_their_own(store) -> None:
    recorded = {**RECORDED, "engine": "test", "template_hash": ""}
    prompts = [[1], [1], [2], [2]]  # two prompts with n=2
    store.record(call("a", choice=n, model_call={**recorded, "prompt_ids": ids}) for n, ids in enumerate(prompts))
    for choice in range(4):
        store.give_feedback(feedback(f"f{choice}", "a", choice=choice, value=choice / 4))
    assert store.commit(group_size=3) == CommitResult(pending_groups=2)
    assert store.commit(group_size=2) == CommitResult(committed=4)
    rows = rows_of_traffic(store.settle(1), 1)
    groups: dict[str, list[list[int]]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row.call.prompt_ids)
    assert list(groups.values()) == [[[1], [1]], [[2], [2]]]
    assert len({row.run_id for row in rows}) == 4


def test_a_report_of_several_metrics_is_stored_as_a_whole_or_not_at_all(store) -> None:
    store.record(call("a", choice=number) for number in range(2))
    helpful = feedback("ticket-1", "a", metric="helpful", value=4.0)
    reward, clash = feedback("ticket-1:reward", "a"), feedback("ticket-1:solved", "a", metric="solved", choice=0)
    with pytest.raises(UserError, match="the answer a has 2 choices"):
        store.give_feedback(helpful, reward)
    corrected = [replace(each, choice=1, request={"choice": 1}) for each in (helpful, reward)]
    assert store.give_feedback(*corrected) == FeedbackResult(matched=1)
    assert [each.reward for each in store.calls(["a"])] == [None, 1.0]
    assert store.give_feedback(*corrected) == FeedbackResult(duplicate=1)
    with pytest.raises(ReusedFeedbackIdError):
        store.give_feedback(clash, replace(corrected[1], value=0.0))
    assert store.give_feedback(clash) == FeedbackResult(matched=1), "it was not stored before"


def test_rows_are_counted_for_each_tenant(store) -> None:
    store.record([call("a", tenant="shop"), call("b", tenant="bank"), call("c", tenant="bank")])
    found = (store.counts("shop")["recorded"], store.counts("bank")["recorded"], store.counts()["recorded"])
    assert found == (1, 2, 3)


def test_unlabelled_calls_expire(store, url, clock) -> None:
    store.record([call("a"), call("b")])
    store.give_feedback(feedback("f", "a"))
    clock.now += 100
    assert TrafficErasure(open_database(url), clock).expire(older_than_s=50) == 1
    assert store.give_feedback(feedback("late", "b")) == FeedbackResult(late=1)
    assert store.counts()["expired"] == 1


@pytest.mark.slow
def test_processes_that_record_and_label_concurrently_lose_no_call(url) -> None:
    stores, failures = [TrafficStore(open_database(url)) for _ in range(4)], []

    def work(store: TrafficStore, name: str) -> None:
        try:
            for number in range(25):
                store.record([call(f"{name}-{number}")])
                assert store.give_feedback(feedback(f"{name}-{number}", f"{name}-{number}")).matched == 1
                store.commit()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(store, str(number))) for number, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(stores[0].settle(1)) == 100


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="expected sqlite:///FILE"):
        open_database("no-url")


def test_a_round_that_found_no_rows_finds_those_that_are_committed_later(store) -> None:
    assert store.settle(1) == []
    store.record([call("a")])
    store.give_feedback(feedback("f1", "a"))
    store.commit()
    assert [row.msg_id for row in store.settle(1)] == ["a"]
    assert not store.is_consumed(1)
    store.consume(1)
    assert store.is_consumed(1)


def test_tenants_have_feedback_ids_tasks_and_commits_of_their_own(store) -> None:
    place = {"task_id": "parcel", "run_id": "0"}
    store.record([call("a", tenant="shop", **place), call("b", tenant="bank", **place)])
    assert store.give_feedback(feedback("ticket-1", "a", value=0.0, tenant="shop")) == FeedbackResult(matched=1)
    assert store.give_feedback(feedback("ticket-1", "b", value=1.0, tenant="bank")) == FeedbackResult(matched=1)
    assert store.give_feedback(feedback("ticket-1", "b", value=1.0, tenant="bank")) == FeedbackResult(duplicate=1)
    assert store.commit(tenant="shop", group_size=2) == CommitResult(pending_groups=1)
    assert store.commit(tenant="shop") == CommitResult(committed=1)
    assert store.commit() == CommitResult(committed=1)
    rows = [ModelCall(**RECORDED), ModelCall(**RECORDED)]
    calls = store.settle(1)
    for stored, recorded in zip(calls, rows, strict=True):
        stored.model_call = {**asdict(recorded), "engine": "test", "template_hash": ""}
    assert [(row.task_id, row.run_reward) for row in rows_of_traffic(calls, 1)] == [
        ("shop/parcel", 0.0), ("bank/parcel", 1.0),
    ]  # fmt: skip


def test_runs_of_a_round_have_unique_names(store) -> None:
    places = [("t", "r", 0), ("t", "r", 1), ("t", "r/1", 0), ("t/r", "1", 0), ("t", "r%2F1", 0)]
    for number, (task, run, choice) in enumerate(places):
        recorded = {**RECORDED, "engine": "test", "template_hash": ""}
        store.record([call(f"m{number}", choice=choice, task_id=task, run_id=run, model_call=recorded)])
        store.give_feedback(feedback(f"f{number}", f"m{number}"))
    store.commit()
    rows = rows_of_traffic(store.settle(1), 1)
    assert len({row.run_id for row in rows}) == len(places)
    assert [row.run_id for row in rows][:2] == ["online/t/r", "online:1/t/r"]


def test_feedback_on_a_forgotten_call_is_not_kept(store, url) -> None:
    store.record([call("a", subject="ann")])
    TrafficErasure(open_database(url)).forget(Person("ann", b"key"))
    assert store.give_feedback(feedback("f1", "a", comment="ann was unhappy")) == FeedbackResult(unknown=("a",))


def test_a_repeated_feedback_on_answers_of_a_forgotten_person_changes_nothing(store, url) -> None:
    """Its id is a digest by then; it would relabel the answers of others by a reward that was replaced."""
    store.record([call("a", subject="ann"), call("b", subject="bob"), call("c", subject="bob")])
    given = feedback("ticket-1", "a", "b", comment="ann is happy", request={"x": 1})
    store.give_feedback(given)
    person, erasure = Person("ann", b"key"), TrafficErasure(engine := open_database(url))
    erasure.forget(person)
    erasure.forget_names(person)
    store.give_feedback(feedback("later", "b", value=0.0))
    assert store.give_feedback(given) == FeedbackResult(duplicate=1, unknown=("a",))
    assert store.calls(["b"])[0].reward == 0.0
    with engine.connect() as connection:
        kept = connection.exec_driver_sql("SELECT feedback_id, comment FROM feedback ORDER BY feedback_id").all()
    assert [(name.partition("-")[0], comment) for name, comment in kept] == [("forgotten", None), ("later", None)]
    others = (
        feedback("value", "a", "b", value=0.5),
        feedback("answers", "a", "b", "c"),
        feedback("own", "b", value=0.25),
    )
    assert [store.give_feedback(other).matched for other in others] == [1, 2, 1]


def test_errors_of_the_database_do_not_show_messages(tmp_path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'traffic.db'}")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE feedback_calls")
        connection.exec_driver_sql("DROP TABLE calls")
    with pytest.raises(SQLAlchemyError) as error:
        TrafficStore(engine).record([call("a", subject="ann", model_call={"text": "a secret"})])
    assert "ann" not in str(error.value) and "secret" not in str(error.value)


def test_feedback_of_a_call_and_counts_of_a_tenant_are_found_by_indexes(tmp_path) -> None:
    engine, statements = open_database(f"sqlite:///{tmp_path / 'traffic.db'}"), list[tuple[str, Any]]()
    traffic = TrafficStore(engine, train_on=RewardFormula.parse("0.5*solved+0.5*helpful"))
    traffic.record([call("a", tenant="shop")])
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2:4]))
    traffic.give_feedback(feedback("f1", "a", metric="solved", tenant="shop"))
    TrafficErasure(engine).expire(60.0)
    traffic.counts("shop")
    plans = []
    with engine.connect() as connection:
        for text, values in [each for each in statements if "feedback_calls" in each[0] or "count(" in each[0]]:
            if not text.startswith("INSERT"):
                plans.append([step[3] for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)])
    used = ("feedback_calls_number (number=?)", "feedback_calls_number (number=?)", "calls_tenant (tenant=?)")
    assert len(plans) == len(used)
    for plan, index in zip(plans, used, strict=True):
        assert any(index in step for step in plan) and not any(step.startswith("SCAN") for step in plan), plan
