"""The built-in workflows ``tool_call`` and ``frozen_lake``."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.config.foreign.names import WORKFLOWS
from rft_platform.inference.interface import SamplingParams
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflows.frozen_lake import MOVES, FrozenLakeWorkflow, Lake, parse_move
from rft_platform.rollout.workflows.tool_call import ToolCallWorkflow, as_tool, conversation
from rft_platform.tasks.task import Task

from .fake_engine import FakeEngine


def rolled_out(engine: FakeEngine, workflow: Any, row: dict[str, Any]) -> list[Any]:
    sampling = SamplingParams(max_tokens=64)
    task = Task("t", "set", json.dumps(row), None, row)
    return run_rollouts(engine, [task], workflow, round=1, batch=0, repeat_times=1, sampling=sampling).rows


@given(st.integers(2, 8), st.floats(0.5, 1), st.integers(0, 999), st.integers(1, 12))
def test_a_lake_has_a_short_way_to_its_goal(size: int, ice: float, seed: int, moves: int) -> None:
    lake = Lake.generate(size, ice, seed, moves)
    assert lake == Lake.generate(size, ice, seed, moves), "a seed is a lake"
    assert 1 <= lake.distance() <= moves and not {lake.start, lake.goal} & lake.holes
    reached = {lake.start}
    for _ in range(int(lake.distance())):
        reached = {lake.after(cell, move) for cell in reached for move in MOVES} - lake.holes | reached
    assert lake.goal in reached


def test_a_lake_without_a_way_is_refused() -> None:
    with pytest.raises(ValueError, match="no lake of size 1"):
        Lake.generate(1, 0.8, 0, 5)


def test_a_lake_as_text() -> None:
    lake = Lake(3, frozenset({(0, 2), (1, 1)}), (0, 0), (2, 2))
    assert lake.drawn((0, 0)) == "P _ O\n_ O _\n_ _ G"
    assert lake.distance() == 4
    assert (lake.after((0, 0), "left"), lake.after((0, 0), "down")) == ((0, 0), (1, 0))


@pytest.mark.parametrize(
    ("text", "move"), [("I go ```Left``` or ``` UP ```", "up"), ("right", None), ("```jump```", None), ("", None)]
)
def test_a_move_is_parsed_from_backticks(text: str, move: str | None) -> None:
    assert parse_move(text) == move


def straight_lake() -> int:
    """A seed whose goal is one move to the right of the start."""
    for seed in range(1000):
        lake = Lake.generate(4, 0.8, seed, 8)
        if lake.after(lake.start, "right") == lake.goal:
            return seed
    raise AssertionError("no such lake")


def test_the_goal_is_reached_or_the_steps_end(engine: FakeEngine) -> None:
    row = {"size": 4, "p": 0.8, "seed": straight_lake()}
    engine.text = "```right```"
    (won,) = rolled_out(engine, FrozenLakeWorkflow(), row)
    assert (won.run_reward, won.metrics) == (1.0, {"steps": 1, "moves": 1, "success": 1, "invalid_moves": 0})
    assert won.env_state_hash is not None and [message["role"] for message in won.messages] == ["system", "user"]
    engine.text = "nowhere"
    rows = rolled_out(engine, FrozenLakeWorkflow(max_steps=3), row)
    assert len(rows) == 3 and rows[-1].run_reward == 0.0 and rows[-1].metrics["invalid_moves"] == 3
    assert "no valid move" in rows[1].messages[-1]["content"]


TOOL = {"name": "add", "description": "Add.", "parameters": {"type": "dict", "properties": {"a": {"type": "dict"}}}}


def test_tools_and_conversations_have_the_form_of_the_api() -> None:
    assert as_tool(TOOL)["function"]["parameters"] == {"type": "object", "properties": {"a": {"type": "object"}}}
    assert as_tool(as_tool(TOOL)) == as_tool(TOOL)
    messages = conversation(
        [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": {"sum": 2}},
            {"role": "assistant", "content": "2"},
        ]
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    (call,) = messages[1]["tool_calls"]
    assert (call["function"], messages[2]["tool_call_id"]) == ({"name": "add", "arguments": '{"a": 1}'}, call["id"])
    assert messages[2]["content"] == '{"sum": 2}'


def test_a_conversation_in_the_form_of_the_api_stays_as_it_is() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    entries = [
        {"role": "user", "content": "1+1?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    assert conversation(entries) == [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]


@pytest.mark.parametrize("given", [{}, {"tool_call_id": "unknown"}])
@pytest.mark.parametrize("is_text", [False, True])
def test_an_observation_without_its_calls_id_answers_the_oldest_open_call(given: dict[str, str], is_text: bool) -> None:
    calls = [{"id": each, "type": "function", "function": {"name": "add", "arguments": "{}"}} for each in "ab"]
    asked = {"role": "assistant", "tool_calls": json.dumps(calls) if is_text else calls}
    answered = {"role": "tool", "content": "2", "tool_call_id": "b"}
    found = conversation([asked, answered, {"role": "tool", "content": "3", **given}])
    assert found[0]["tool_calls"] == calls
    assert [each["tool_call_id"] for each in found[1:]] == ["b", "a"]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ([{"name": "calculator", "arguments": {"expression": "1+1"}}], 1.0),
        ([{"name": "calculator", "arguments": {"expression": "2"}}], 0.0),
        ([], -1.0),
    ],
)
def test_the_calls_of_a_row_are_judged(engine: FakeEngine, answer: list[Any], reward: float) -> None:
    tool = {"name": "calculator", "parameters": {"type": "dict", "properties": {"expression": {"type": "string"}}}}
    row = {
        "raw_system": "Use the tools.",
        "tools": json.dumps([tool]),
        "conversations": [{"from": "user", "value": "call: 1+1"}],
        "answer": json.dumps(answer),
    }
    (found,) = rolled_out(engine, ToolCallWorkflow(), row)
    assert [message["role"] for message in found.messages] == ["system", "user"] and found.metrics == {"tool_calls": 1}
    assert found.tools[0]["function"]["name"] == "calculator"
    known = WORKFLOWS["toolcall_workflow"].judge
    assert isinstance(known, list)
    (judged,) = judge_runs([found], {"t": Task("t", "set", "", None, row)}, build_judge("tool_use", known[0]["args"]))
    assert judged.reward == reward


def test_the_error_names_a_row_without_tools(engine: FakeEngine) -> None:
    from rft_platform.common.errors import UserCodeError

    with pytest.raises(UserCodeError, match="column 'conversations' is None"):
        rolled_out(engine, ToolCallWorkflow(), {"tools": []})


def test_each_observation_answers_the_call_at_its_position():
    entries = [
        {"from": "human", "value": "Weather in Rome and Oslo?"},
        {"from": "function_call", "value": [{"name": "weather", "arguments": {"city": c}} for c in ("Rome", "Oslo")]},
        {"from": "observation", "value": "sun"},
        {"from": "observation", "value": "snow"},
        {"from": "observation", "value": "an answer to no call"},
        {"from": "function_call", "value": {"name": "weather", "arguments": {"city": "Bonn"}}},
        {"from": "function_call", "value": {"name": "weather", "arguments": {"city": "Kyiv"}}},
        {"from": "observation", "value": "rain"},
        {"from": "observation", "value": "fog"},
    ]
    messages = conversation(entries)
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["call-1-0", "call-1-1"]
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert answered == ["call-1-0", "call-1-1", "call-4-0", "call-5-0", "call-6-0"]
