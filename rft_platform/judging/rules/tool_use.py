"""The judge ``tool_use`` rewards the right tools, the right arguments, results without errors, and no invalid calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rft_platform.judging.judged_run import JudgedRun, ToolCall
from rft_platform.judging.rules.patterns import allows, search
from rft_platform.judging.types import JudgeOutput

ERROR_PATTERN = r"(?i)^\s*(error|exception|traceback|failed)\b|^\s*\{\s*\"error\"\s*:"


def tool_use(
    task: dict[str, Any],
    response: Any,
    run: JudgedRun,
    *,
    calls_key: str = "tool_calls",
    correct_tool: float = 1.0,
    correct_args: float = 0.5,
    tool_success: float = 1.0,
    invalid_tool: float = -2.0,
    unneeded_tool: float = 0.0,
    ordered: bool = False,
    error_pattern: str = ERROR_PATTERN,
) -> JudgeOutput:
    """The sum of five shares, each with its weight; the shares are metrics of the same names.

    The column ``calls_key`` holds the expected calls: a list (or its JSON text) of ``{name, arguments}``; without
    ``arguments`` any are accepted. Each expected call matches at most one call that was made (``ordered``: in the same
    order).

    - ``correct_tool``: expected calls whose tool was called; ``correct_args``: expected calls that were made with
      exactly the expected arguments.
    - ``tool_success``: calls made that have a result which does not match ``error_pattern``.
    - ``invalid_tool``: calls made to a tool that was not offered, or with arguments that the tool's schema refuses.
    - ``unneeded_tool``: calls made that match no expected call.

    For a task without expected calls, the first three shares are 1 if the run makes no call, else 0.
    """
    expected, calls = _expected_calls(task, calls_key), list(run.tool_calls)
    named, exact = _matches(expected, calls, ordered)
    succeeded = [call for call in calls if call.result is not None and not search(error_pattern, call.result)]
    schemas = {str(tool.get("function", {}).get("name")): tool["function"].get("parameters") for tool in run.tools}
    none_needed = float(not calls)
    shares = {
        "correct_tool": named / len(expected) if expected else none_needed,
        "correct_args": exact / len(expected) if expected else none_needed,
        "tool_success": len(succeeded) / len(calls) if calls else float(not expected),
        "invalid_tool": sum(not _valid(call, schemas) for call in calls) / len(calls) if calls else 0.0,
        "unneeded_tool": (len(calls) - named) / len(calls) if calls else 0.0,
    }
    if not expected and calls:
        shares["tool_success"] = 0.0
    weights = {
        "correct_tool": correct_tool,
        "correct_args": correct_args,
        "tool_success": tool_success,
        "invalid_tool": invalid_tool,
        "unneeded_tool": unneeded_tool,
    }
    return JudgeOutput(sum(weights[name] * share for name, share in shares.items()), shares)


def _expected_calls(task: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    """Name and arguments (None: any) of each expected call."""
    if key not in task:
        raise KeyError(
            f"the task has no column {key!r} with the expected tool calls; its columns are {', '.join(task)}"
        )
    raw = json.loads(task[key]) if isinstance(task[key], str) else task[key]
    calls = []
    for call in [raw] if isinstance(raw, Mapping) else raw or []:
        function = call["function"] if isinstance(call.get("function"), Mapping) else call
        name = function.get("name") or function.get("tool")
        if not name:
            raise ValueError(f"column {key!r}: {call!r} names no tool; expected {{'name': ..., 'arguments': {{...}}}}")
        arguments = function.get("arguments", function.get("args"))
        calls.append((str(name), json.loads(arguments) if isinstance(arguments, str) else arguments))
    return calls


def _matches(expected: Sequence[tuple[str, Any]], calls: Sequence[ToolCall], ordered: bool) -> tuple[int, int]:
    """Number of expected calls that were made, by name and with their arguments; no call counts twice."""
    if ordered:
        return _common(expected, calls, _same_tool), _common(expected, calls, _same_call)
    remaining, open_calls, exact = list(calls), [], 0
    for call in sorted(expected, key=lambda call: call[1] is None):  # calls that accept any arguments are matched last
        found = next((other for other in remaining if _same_call(call, other)), None)
        if found is None:
            open_calls.append(call)
        else:
            exact += 1
            remaining.remove(found)
    named = exact
    for call in open_calls:
        found = next((other for other in remaining if _same_tool(call, other)), None)
        if found is not None:
            named += 1
            remaining.remove(found)
    return named, exact


def _common(expected: Sequence[tuple[str, Any]], calls: Sequence[ToolCall], same: Any) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(calls) + 1)
    for call in expected:
        before = row
        row = [0]
        for position, other in enumerate(calls):
            row.append(before[position] + 1 if same(call, other) else max(row[-1], before[position + 1]))
    return row[-1]


def _same_tool(expected: tuple[str, Any], call: ToolCall) -> bool:
    return expected[0] == call.name


def _same_call(expected: tuple[str, Any], call: ToolCall) -> bool:
    return _same_tool(expected, call) and (expected[1] is None or (call.is_json and expected[1] == call.arguments))


def _valid(call: ToolCall, schemas: Mapping[str, Any]) -> bool:
    """Whether the tool was offered, and its schema allows the arguments."""
    if call.name not in schemas or not call.is_json:
        return False
    schema = schemas[call.name]
    return not schema or allows(schema, call.arguments)
