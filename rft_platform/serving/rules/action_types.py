"""What a call did: called a tool rightly or wrongly, asked a question, or answered.

A policy that is trained on feedback may learn to send broken tool calls, or to ask questions so that it takes no risk.
The rate of each action and its mean reward show both.
"""

import json
from collections.abc import Mapping
from typing import Any

TOOL_VALID, TOOL_INVALID = "tool_valid", "tool_invalid"
QUESTION, ANSWER = "question", "answer"
ACTIONS = (TOOL_VALID, TOOL_INVALID, QUESTION, ANSWER)

_MARKS = ("<tool_call>", "<|tool_call", "[TOOL_CALLS]", "<function=")  # of a tool call that no parser has understood
_QUESTION_MARKS = ("?", "？", "؟")
_CLOSING = " \t\r\n*_\"'`)]}»”’"


def action_of(call: Mapping[str, Any]) -> str:
    """The action of a recorded call (``messages``, ``tools``, ``response``).

    A tool call is valid if it names a tool of the request and its arguments are a JSON object with all required
    parameters. An answer that ends with a question mark is a question.
    """
    response = call.get("response") or {}
    calls, text = response.get("tool_calls") or [], response.get("content")
    if calls:
        tools = {name: parameters for name, parameters in map(_tool, call.get("tools") or []) if isinstance(name, str)}
        return TOOL_VALID if all(_is_valid(each, tools) for each in calls) else TOOL_INVALID
    if not isinstance(text, str):
        return ANSWER
    if call.get("tools") and any(mark in text for mark in _MARKS):
        return TOOL_INVALID
    return QUESTION if text.rstrip(_CLOSING).endswith(_QUESTION_MARKS) else ANSWER


def _tool(tool: Any) -> tuple[Any, Any]:
    """Name and parameters of a tool, in the form of chat completions or of responses."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return (function.get("name"), function.get("parameters")) if isinstance(function, Mapping) else (None, None)


def _is_valid(call: Any, tools: Mapping[Any, Any]) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or name not in tools:
        return False
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        return False
    if not isinstance(arguments, dict):
        return False
    parameters = tools[name]
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    return all(isinstance(each, str) and each in arguments for each in required) if isinstance(required, list) else True
