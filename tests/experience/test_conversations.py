"""The view ``conversations``: a run as the one document that people collect."""

import json
from pathlib import Path
from typing import Any

import pytest

from rft_platform.experience.queries import connect
from rft_platform.experience.record import row_id
from rft_platform.experience.store import ExperienceStore

from .samples import judged, rollouts


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    return ExperienceStore(tmp_path / "rounds")


def call(number: int, query: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    return {"id": f"c{number}", "type": "function", "function": function}


def test_a_conversation_is_one_row(store: ExperienceStore) -> None:
    user = {"role": "user", "content": "Größe?"}
    asks = {"role": "assistant", "content": None, "reasoning_content": "I must search.",
            "tool_calls": [call(1, "a"), call(2, "b")]}  # fmt: skip
    found = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"result {n}"} for n in (2, 1)]
    again = {"role": "assistant", "content": "wait", "tool_calls": [call(3, "c")]}
    says = {"role": "assistant", "content": "42", "reasoning": "Now I know."}
    turns: list[tuple[list[Any], Any]] = [([user], asks), ([user, asks, *found], again), ([user, again], says)]
    (first,) = rollouts(1, 1)
    rows = []
    for step, (messages, response) in enumerate(turns):
        changes = {"step": step, "row_id": row_id(first.run_id, step), "messages": messages, "response": response}
        rows += rollouts(1, 1, **changes)
    store.write_rollouts(1, 0, rows)
    parts = {"task_completion": 0.8, "efficiency": 0.6, "user_satisfaction": 0.8}
    store.write_judged(1, "v", judged(rows, "v", reward=2.2, reward_parts=parts))
    with connect(store) as connection:
        cursor = connection.execute("SELECT * FROM conversations")
        names = [column[0] for column in cursor.description]
        (row,) = cursor.fetchall()
    found_row = dict(zip(names, row, strict=True))
    assert (found_row["conversation_id"], found_row["task_id"], found_row["round"]) == (first.run_id, "task-0", 1)
    assert json.loads(found_row["messages"]) == [user, again, says]
    assert found_row["thoughts"] == [{"step": 1, "content": "I must search."}, {"step": 3, "content": "Now I know."}]
    assert [(c["step"], c["tool"], json.loads(c["args"]), c["result"]) for c in found_row["tool_calls"]] == [
        (1, "search", {"query": "a"}, "result 1"),
        (1, "search", {"query": "b"}, "result 2"),
        (2, "search", {"query": "c"}, None),
    ]
    assert dict(found_row["rewards"]) == parts and found_row["total_reward"] == 2.2


@pytest.mark.parametrize("kept", [9, 1])
def test_a_call_whose_id_was_used_before_has_its_own_result(store: ExperienceStore, kept: int) -> None:
    """``kept``: results of earlier calls that the agent keeps in its prompts."""
    (first,) = rollouts(1, 1)
    results = [{"role": "tool", "tool_call_id": "c0", "content": f"result {n}"} for n in range(3)]
    rows = []
    for step in range(4):
        asks = {"role": "assistant", "content": None, "tool_calls": [call(0, f"query {step}")]}
        found = results[:step][-kept:]
        rows += rollouts(1, 1, step=step, row_id=row_id(first.run_id, step), messages=found, response=asks)
    store.write_rollouts(1, 0, rows)
    with connect(store) as connection:
        ((calls,),) = connection.execute("SELECT tool_calls FROM conversations").fetchall()
    assert [(c["step"], json.loads(c["args"])["query"], c["result"]) for c in calls] == [
        (1, "query 0", "result 0"), (2, "query 1", "result 1"), (3, "query 2", "result 2"), (4, "query 3", None),
    ]  # fmt: skip


def test_runs_without_tools_or_judgement_are_there_too(store: ExperienceStore) -> None:
    with connect(store) as connection:
        assert connection.execute("SELECT count(*) FROM conversations").fetchall() == [(0,)]
    rows = rollouts(2, 2) + rollouts(1, 1, round=2)
    store.write_rollouts(1, 0, rows[:4])
    store.write_rollouts(2, 0, rows[4:])
    with connect(store) as connection:
        query = "SELECT conversation_id, len(thoughts), len(tool_calls), total_reward FROM conversations ORDER BY ALL"
        assert connection.execute(query).fetchall() == [(row.run_id, 0, 0, None) for row in rows]
    with connect(store, rounds=[2]) as connection:
        assert connection.execute("SELECT count(*) FROM conversations").fetchall() == [(1,)]


def test_of_several_choices_one_counts(store: ExperienceStore) -> None:
    (first,) = rollouts(1, 1)
    rows = [
        row
        for choice in range(2)
        for row in rollouts(1, 1, row_id=row_id(first.run_id, 0, choice), response={"content": f"choice {choice}"})
    ]
    store.write_rollouts(1, 0, rows)
    with connect(store) as connection:
        ((messages,),) = connection.execute("SELECT messages FROM conversations").fetchall()
    assert json.loads(messages)[-1]["content"] in ("choice 0", "choice 1") and len(json.loads(messages)) == 2
