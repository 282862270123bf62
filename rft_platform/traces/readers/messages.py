"""Chat messages in the forms that tracing libraries record, as messages of OpenAI's API.

Known forms: OpenAI's chat completions and responses, Anthropic's messages, Gemini's contents, LangChain's serialised
messages, and the message parts of OpenTelemetry's GenAI conventions. Any of them may be JSON text.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rft_platform.tasks.messages import Message
from rft_platform.traces.readers.trace import BadTraceError, TracedCall, without_beginning

_ROLES = {
    "human": "user", "HumanMessage": "user", "HumanMessageChunk": "user", "ai": "assistant", "AIMessage": "assistant",
    "AIMessageChunk": "assistant", "SystemMessage": "system", "ToolMessage": "tool", "function": "tool",
    "FunctionMessage": "tool", "model": "assistant",
}  # fmt: skip
_CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
#: Parts of a message that hold text, and the key of the text.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
#: Keys of a model's or an agent's input or output that hold it, the most specific first.
_HOLDERS = (
    "messages", "choices", "generations", "candidates", "contents", "message", "input", "output", "question", "query",
    "prompt", "answer", "response", "result", "text", "content",
)  # fmt: skip

#: Those of them that only a recorded input or output has.
_STRUCTURED = ("messages", "choices", "generations", "candidates", "contents")
_SHOWN = 60  # characters of a name in a message: reports must not quote the texts of traces


def messages_of(value: Any, role: str = "user") -> list[Message]:
    """The messages in a recorded input or output; text alone is one message of ``role``. Raises BadTraceError."""
    found = decoded(value)
    if isinstance(value, str) and not _holds_messages(found, role):
        found = value  # an answer in JSON is a text, too
    value = found
    if value is None or value in ("", [], {}):
        return []
    if isinstance(value, list):
        return _conversation(value, role)
    if not isinstance(value, Mapping):
        return [{"role": role, "content": str(value)}]
    if _is_message(value):
        return _conversation([value], role)
    if value.get("object") == "response":
        return _conversation(value.get("output") or [], role)
    holder = next((name for name in _HOLDERS if value.get(name) not in (None, "", [], {})), None)
    if holder is None:
        kind, keys = "input" if role == "user" else "output", ", ".join(map(str, value)) or "none"
        raise BadTraceError(f"the {kind} of a span holds no message; its keys are {keys[:_SHOWN]}")
    return [*_instructions(value), *_held(holder, value[holder], role)]


def traced_call(started_at: float, given: Any, returned: Any, tools: Any) -> TracedCall:
    """The call with a recorded input, output and definitions of tools. Raises BadTraceError."""
    messages = messages_of(given)
    answer = without_beginning(messages_of(returned, "assistant"), messages)
    return TracedCall(started_at, messages, answer, tools_of(tools))


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Definitions of tools in any form, as those of OpenAI's chat completions."""
    tools = decoded(value)
    found = [decoded(tool) for tool in tools] if isinstance(tools, list) else []
    return [_tool(tool) for tool in found if isinstance(tool, Mapping) and (tool.get("name") or tool.get("function"))]


def decoded(value: Any) -> Any:
    """``value``, or what it is as JSON text of a list or an object."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping, perhaps as JSON text; anything else is an empty one."""
    found = decoded(value)
    return found if isinstance(found, Mapping) else {}


def _holds_messages(value: Any, role: str) -> bool:
    """Whether what was JSON text is a recorded input or output, and not a question or an answer in JSON."""
    if isinstance(value, list):
        parts = value[0] if value and isinstance(value[0], list) else value
        known = (isinstance(part, Mapping) and (_is_message(part) or part.get("type") in _TEXTS) for part in parts)
        return bool(parts) and all(known)
    if not isinstance(value, Mapping):
        return False
    holders = _HOLDERS if role == "user" else _STRUCTURED
    return _is_message(value) or value.get("object") == "response" or any(name in value for name in holders)


def _held(holder: str, value: Any, role: str) -> list[Message]:
    if holder in ("choices", "generations", "candidates"):
        value = decoded(value)
        first = value[0][0] if isinstance(value[0], list) else value[0]
        return messages_of(first, role)
    return messages_of(value, role)


def _instructions(value: Mapping[str, Any]) -> list[Message]:
    """The system message that a request has beside its messages."""
    found = value.get("system") or value.get("instructions")
    return [{"role": "system", "content": _text(found)}] if found else []


def _is_message(value: Mapping[str, Any]) -> bool:
    return (
        isinstance(value.get("role"), str)
        or value.get("lc") is not None
        or value.get("type") in (*_ROLES, "function_call", "function_call_output")
        or (value.get("type") in _CHAT_ROLES and ("content" in value or "data" in value))
    )


def _conversation(entries: list[Any], role: str) -> list[Message]:
    if isinstance(entries[0], list):  # a batch of one conversation
        return messages_of(entries[0], role)
    if all(isinstance(entry, Mapping) and entry.get("type") in _TEXTS and "role" not in entry for entry in entries):
        return [{"role": role, "content": _text(entries)}]
    messages: list[Message] = []
    for entry in entries:
        for message in _messages(decoded(entry), role):
            calls = message.get("tool_calls")
            if calls and not message["content"] and messages and messages[-1]["role"] == "assistant":
                messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), *calls]}
            else:
                messages.append(message)
    return messages


def _messages(entry: Any, role: str) -> Iterator[Message]:
    """The messages of one entry of a conversation; results of tools that it contains are separate messages."""
    if isinstance(entry, str):
        yield {"role": role, "content": entry}
        return
    if not isinstance(entry, Mapping):
        raise BadTraceError(f"has a message that is no object but {type(entry).__name__}")
    if "lc" in entry:  # LangChain: a constructor with its arguments
        entry = {"type": (entry.get("id") or [""])[-1], **mapping(entry.get("kwargs"))}
    if isinstance(entry.get("data"), Mapping) and "content" not in entry:
        entry = {"type": entry.get("type"), **entry["data"]}
    kind = entry.get("type")
    if kind in _THOUGHTS:
        return
    if kind == "function_call":
        call = {"id": entry.get("call_id"), "name": entry.get("name"), "arguments": entry.get("arguments")}
        yield {"role": "assistant", "content": "", "tool_calls": [_call(call)]}
    elif kind == "function_call_output":
        yield _result(entry.get("call_id"), entry.get("output"))
    elif isinstance(entry.get("message"), Mapping) and "role" not in entry:
        yield from _messages(entry["message"], role)
    else:
        yield from _chat_message(entry, _role(entry, role))


def _role(entry: Mapping[str, Any], role: str) -> str:
    given = entry.get("role") or entry.get("type") or role
    found = _ROLES.get(str(given), str(given))
    if found not in _CHAT_ROLES:
        raise BadTraceError(f"has a message of the role {str(given)[:_SHOWN]!r}")
    return found


def _chat_message(entry: Mapping[str, Any], role: str) -> Iterator[Message]:
    parts = entry.get("parts", entry.get("content", entry.get("text")))
    content, calls, results = _parts(parts)
    known = {call["id"] for call in calls if call["id"]}  # LangChain lists the tool_use parts of the content again
    listed = [_call(call) for call in decoded(entry.get("tool_calls")) or ()]
    calls += [call for call in listed if call["id"] not in known]
    if role == "tool" and not results:
        yield _result(entry.get("tool_call_id") or entry.get("id"), content)
        return
    yield from results
    if content or calls or not results:
        yield {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}


def _parts(value: Any) -> tuple[str, list[dict[str, Any]], list[Message]]:
    """The text, the calls of tools and the results of tools in the content of a message."""
    if not isinstance(value, list):
        return _text(value), [], []
    texts, calls, results = list[str](), list[dict[str, Any]](), list[Message]()
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("tool_call", "tool_use"):
            calls.append(_call(part))
        elif kind in ("tool_call_response", "tool_result"):
            result = next((part[name] for name in ("response", "result", "content") if part.get(name) is not None), "")
            results.append(_result(part.get("id") or part.get("tool_use_id"), result))
        elif isinstance(part, Mapping) and isinstance(part.get("functionCall", part.get("function_call")), Mapping):
            calls.append(_call(part.get("functionCall") or part["function_call"]))
        elif kind not in _THOUGHTS:
            texts.append(_text_part(part))
    return "".join(texts), calls, results


def _text_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type")
        found = part.get(_TEXTS.get(str(kind), "text"), part.get("content"))
        if isinstance(found, str) and (kind is None or kind in _TEXTS):
            return found
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise BadTraceError(f"has content of the type {str(kind)[:_SHOWN]!r}; only text can be trained on")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, str | Mapping) for part in value):
        return "".join(map(_text_part, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _result(call_id: Any, value: Any) -> Message:
    """A message with the result of a tool; a result without text is written as JSON."""
    try:
        content = _text(value)
    except BadTraceError:
        content = json.dumps(value, ensure_ascii=False)
    return {"role": "tool", "content": content, "tool_call_id": str(call_id or "")}


def _call(call: Any) -> dict[str, Any]:
    function = mapping(call.get("function")) or call
    given: Any = next((function[key] for key in ("arguments", "args", "input") if function.get(key) is not None), {})
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    named = {"name": str(function["name"]), "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = mapping(tool.get("function")) or tool
    schemas = (function.get(name) for name in ("parameters", "input_schema", "inputSchema"))
    schema = next((decoded(schema) for schema in schemas if schema), {"type": "object", "properties": {}})
    described = {"description": function["description"]} if function.get("description") else {}
    return {"type": "function", "function": {"name": str(function["name"]), **described, "parameters": schema}}
