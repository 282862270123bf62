"""A built-in workflow of one model call with the tools of the task's row, for datasets of function calls."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.tasks.task import Task

_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # names of ShareGPT


@dataclass(frozen=True, slots=True)
class ToolCallWorkflow:
    """Let the model continue the row's conversation, with the row's tools. The tools are offered, and not run.

    ``tools_key``: a list of tools, each ``{name, description, parameters}`` or in the form of OpenAI's API.
    ``conversation_key``: a list of messages, each ``{role, content}`` or, as in ShareGPT, ``{from, value}``; a message
    of ``function_call`` has the calls ``{name, arguments}`` as its value. Both columns may be JSON text.
    ``system_key``: a column with the system message; a row may lack it.
    """

    tools_key: str = "tools"
    conversation_key: str = "conversations"
    system_key: str = "raw_system"

    async def run(
        self, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Return the answer's text as the response; the judge ``tool_use`` sees the calls. Metric: tool_calls."""
        system = task.raw.get(self.system_key)
        messages = [{"role": "system", "content": str(system)}] if system else []
        messages += conversation(_column(task, self.conversation_key))
        tools = [as_tool(tool) for tool in _column(task, self.tools_key)]
        answer = await model.chat(messages, tools=tools or None)
        calls = answer.get("tool_calls") or []
        return WorkflowOutput(response=answer.get("content") or "", metrics={"tool_calls": float(len(calls))})


def _column(task: Task, key: str) -> list[Mapping[str, Any]]:
    value = task.raw.get(key)
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise ValueError(
            f"column {key!r} is {value!r}: workflow tool_call expected a list of mappings, or its JSON text"
        )
    return value


def as_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of OpenAI's API. The type ``dict`` of a parameter, as ToolACE has it, becomes ``object``."""
    function = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
    return {"type": "function", "function": {**function, "parameters": _schema(function.get("parameters") or {})}}


def _schema(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: "object" if key == "type" and value == "dict" else _schema(value) for key, value in node.items()}
    return [_schema(value) for value in node] if isinstance(node, list) else node


def conversation(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a conversation, in the form of OpenAI's API."""
    messages: list[dict[str, Any]] = []
    open_calls: deque[str] = deque()  # ids of the calls that no observation has answered yet
    for number, entry in enumerate(entries):
        role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
        role = _ROLES.get(str(role), str(role))
        if role == "function_call":
            calls = _calls(content, number)
            open_calls.extend(call["id"] for call in calls)
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif role == "tool":
            called = str(entry.get("tool_call_id") or f"call-{number}-0")
            if called in open_calls:
                open_calls.remove(called)
            elif open_calls:
                called = open_calls.popleft()
            messages.append({"role": "tool", "content": _text(content), "tool_call_id": called})
        else:
            messages.append({"role": role, "content": _text(content)})
            if given := entry.get("tool_calls"):
                calls = json.loads(given) if isinstance(given, str) else given
                open_calls.extend(call["id"] for call in calls if call.get("id"))
                messages[-1]["tool_calls"] = calls
    return messages


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    value = json.loads(value) if isinstance(value, str) else value
    return [
        {
            "id": f"call-{number}-{index}",
            "type": "function",
            "function": {"name": call["name"], "arguments": _text(call.get("arguments") or {})},
        }
        for index, call in enumerate([value] if isinstance(value, Mapping) else value)
    ]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
