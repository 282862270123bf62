"""Classify a call by its action: a valid tool call, an invalid tool call, a question, or an answer.

A policy that is trained on feedback may learn to send broken tool calls, or to ask questions to avoid risk. The rate
of each action and its mean reward show this.
"""

import json
from collections.abc import Mapping
from typing import Any

TOOL_VALID, TOOL_INVALID = "tool_valid", "tool_invalid"
QUESTION, ANSWER = "question", "answer"
ACTIONS = (TOOL_VALID, TOOL_INVALID, QUESTION, ANSWER)

_MARKS = ("<tool_call>", "<|tool_call", "[TOOL_CALLS]", "<function=")  # text left by a tool call that was not parsed
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
    """Name and parameters of a tool in the format of OpenAI's chat completions API or responses API."""
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
