"""Convert the input items of a response request to chat messages."""

from typing import Any

from rft_platform.common.errors import UserError

_TEXTS = ("input_text", "output_text", "text", "refusal")
_ROLES = {"developer": "system"}  # chat templates know only the older name


def chat_messages(items: Any, instructions: Any = None) -> list[dict[str, Any]]:
    """Return the conversation. The tool calls of one turn, and the text before them, become one assistant message.

    Raises UserError for items that a chat cannot represent: images, files, hosted tools, references to stored items.
    """
    if instructions is not None and not isinstance(instructions, str):
        raise UserError("instructions: expected a text")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise UserError("input: expected a text or a list of items")
    for item in items:
        if not isinstance(item, dict):
            raise UserError(f"input: expected items that are objects, not {type(item).__name__}")
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        message: dict[str, Any] = {
            "role": _ROLES.get(item.get("role", ""), item.get("role")),
            "content": _text(item.get("content")),
        }
        if message["role"] == "assistant" and _is_open(messages):
            messages[-1]["content"] = (messages[-1]["content"] or "") + message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
    elif kind == "reasoning":
        if thought := "".join(str(part.get("text") or "") for part in item.get("content") or []):
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    else:
        raise UserError(
            f"input: items of type {kind!r} are not supported; send messages, function_call, function_call_output or "
            "reasoning items, in full, because no items are stored here"
        )


def _is_open(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message has only reasoning, so that the following text belongs to the same message."""
    return bool(messages) and "reasoning_content" in messages[-1] and "tool_calls" not in messages[-1]


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant message that a tool call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UserError(f"input: content must be text or a list of parts, not {type(content).__name__}")
    kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content}
    if not kinds <= set(_TEXTS):
        raise UserError(f"input: content has parts {sorted(map(str, kinds))}: the policy reads text parts only")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
