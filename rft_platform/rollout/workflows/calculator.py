"""A built-in multi-turn workflow: the model may call a calculator before it answers."""

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.tasks.task import Task

CALCULATOR_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example (12 + 34) * 5"}},
            "required": ["expression"],
        },
    },
}

_MAX_CHARACTERS = 200
_MAX_EXPONENT = 64
_MAX_MAGNITUDE = 1e100  # keeps chained powers from exhausting memory

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> int | float:
    """Evaluate an expression of numbers, ``+ - * / // % **`` and parentheses; nothing else is ever evaluated.

    Raises ``ValueError`` with the reason if the expression is invalid.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"expression of {len(expression)} characters, at most {_MAX_CHARACTERS}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"not an arithmetic expression: {expression!r}") from error
    except ArithmeticError as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result = value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            result = _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(b) > _MAX_EXPONENT:
                raise ValueError(f"exponent {b}, at most {_MAX_EXPONENT}")
            result = _BINARY[type(op)](a, b)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")
    if isinstance(result, complex) or not abs(result) <= _MAX_MAGNITUDE:
        raise ValueError(f"{ast.unparse(node)!r} has no value of at most {_MAX_MAGNITUDE:g}")
    return result


@dataclass(frozen=True, slots=True)
class CalculatorWorkflow:
    """Let the model call ``calculator`` until it answers without a call, at most ``max_turns`` model calls."""

    system_prompt: str | None = None
    max_turns: int = 4

    async def run(
        self, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Return the last message's text as the response. Metrics: turns, tool_calls, tool_errors."""
        system = task.system_messages(self.system_prompt)
        messages: list[dict[str, Any]] = [*system, {"role": "user", "content": task.prompt}]
        metrics = {"turns": 0.0, "tool_calls": 0.0, "tool_errors": 0.0}
        answer: dict[str, Any] = {}
        while metrics["turns"] < self.max_turns:
            answer = await model.chat(messages, tools=[CALCULATOR_TOOL])
            metrics["turns"] += 1
            calls = answer.get("tool_calls") or []
            if not calls:
                break
            messages = [*messages, answer]
            for call in calls:
                result, failed = _call_tool(call["function"])
                metrics["tool_calls"] += 1
                metrics["tool_errors"] += failed
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return WorkflowOutput(response=answer.get("content") or "", metrics=metrics)


def _call_tool(function: dict[str, str]) -> tuple[str, bool]:
    """Return the result of a tool call as text for the model, and whether it is an error."""
    try:
        if function["name"] != "calculator":
            raise ValueError(f"unknown tool {function['name']!r}, expected 'calculator'")
        arguments = json.loads(function["arguments"])
        if not isinstance(arguments, dict) or not isinstance(arguments.get("expression"), str):
            raise ValueError("expected arguments {'expression': text}")
        return str(calculate(arguments["expression"])), False
    except (ValueError, RecursionError) as error:  # the model sees the error and can correct its call
        return f"error: {error}", True
