"""The calculator tool and the workflow that offers it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflows.calculator import CalculatorWorkflow, calculate
from rft_platform.tasks.task import Task

from .fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1+2*3", 7), ("-(2 - 5) ** 2", -9), ("7 // 2", 3), ("7 % 4", 3), ("1 / 4", 0.25), (" 3.5 + 1 ", 4.5)],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "__import__('os')", "a", "[1]", "1 if 2 else 3", "True", "'a' * 9", "2 ** 65", "9**9**9", "9**64**2", "1 / 0",
     "(-8) ** 0.5", "1e99 * 1e99", "1 +", "1" * 201, "1j", "\x00", "(" * 150],
)  # fmt: skip
def test_everything_else_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)


@given(st.integers(-(10**6), 10**6), st.sampled_from("+-*"), st.integers(-(10**6), 10**6))
def test_agrees_with_python(a: int, operation: str, b: int) -> None:
    expected = {"+": a + b, "-": a - b, "*": a * b}[operation]
    assert calculate(f"({a}) {operation} ({b})") == expected


@pytest.mark.parametrize(("expression", "result", "errors"), [("6 * 7", "42", 0), ("6 * x", "error: 'x' is not", 1)])
def test_tool_result_goes_back_to_the_model(engine: FakeEngine, expression: str, result: str, errors: int) -> None:
    task = Task("t", "set", f"call: {expression}", None, {})
    batch = run_rollouts(
        engine, [task], CalculatorWorkflow("use the tool"), round=1, batch=0, repeat_times=1,
        sampling=SamplingParams(max_tokens=64),
    )  # fmt: skip
    first, second = batch.rows
    assert (first.step, second.step) == (0, 1)
    assert first.tools[0]["function"]["name"] == "calculator"
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "tool"]
    assert second.messages[-1]["content"].startswith(result)
    assert second.run_output == second.response["content"]
    assert (first.run_output, first.metrics) == (None, {})
    assert second.metrics == {"turns": 2, "tool_calls": 1, "tool_errors": errors}


def test_turns_are_bounded(engine: FakeEngine) -> None:
    task = Task("t", "set", "call: 1+1", None, {})
    batch = run_rollouts(
        engine, [task], CalculatorWorkflow(max_turns=1), round=1, batch=0, repeat_times=2,
        sampling=SamplingParams(max_tokens=64),
    )  # fmt: skip
    assert [row.metrics["turns"] for row in batch.rows] == [1, 1]
    assert [row.run_output for row in batch.rows] == ["", ""]
