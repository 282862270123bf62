"""Convert a chat answer to a response."""

from typing import Any

#: Fields in which engines return the model's reasoning.
THOUGHTS = ("reasoning_content", "reasoning")
_ECHOED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "reasoning", "user", "top_logprobs")


def response_id(answer: dict[str, Any]) -> str:
    """Id of the response made from a chat answer."""
    return "resp_" + str(answer["id"]).removeprefix("chatcmpl-")


def response_of(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the response to ``body`` made from ``answer``, a whole chat answer."""
    (choice,) = answer["choices"]
    frame = response_frame(body, answer)
    frame["output"] = output_items(answer, choice)
    return closed(frame, choice.get("finish_reason"), answer.get("usage"))


def response_frame(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return a response with status in progress and no output; ``answer`` may be a chunk of a streamed answer."""
    frame = {
        "id": response_id(answer),
        "object": "response",
        "created_at": answer.get("created") or 0,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": answer.get("model"),
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "store": False,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
        **{name: body.get(name) for name in _ECHOED},
    }
    if "policy_version" in answer:
        frame["policy_version"] = answer["policy_version"]
    return frame


def closed(frame: dict[str, Any], finish_reason: str | None, usage: dict[str, Any] | None) -> dict[str, Any]:
    """Set usage and final status of a response whose output is complete."""
    cut = finish_reason == "length"
    if usage is not None:
        frame["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
    frame["status"] = "incomplete" if cut else "completed"
    frame["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    return frame


def output_items(answer: dict[str, Any], choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items for reasoning, text and tool calls, in this order."""
    message, suffix = choice["message"], response_id(answer).removeprefix("resp_")
    status = "incomplete" if choice.get("finish_reason") == "length" else "completed"
    items: list[dict[str, Any]] = []
    if thought := next((message[name] for name in THOUGHTS if message.get(name)), None):
        items.append(reasoning_item(f"rs_{suffix}", thought, status))
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        part = text_part(message.get("content") or "", logprobs)
        items.append(message_item(f"msg_{suffix}", [part], status))
    return items + [call_item(f"fc_{suffix}_{index}", call, status) for index, call in enumerate(calls)]


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The text part of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def message_item(item_id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """A message item."""
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def call_item(item_id: str, call: dict[str, Any], status: str) -> dict[str, Any]:
    """A function call item."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    fields = {"call_id": call["id"], "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **fields}


def reasoning_item(item_id: str, thought: str, status: str) -> dict[str, Any]:
    """A reasoning item."""
    content = [{"type": "reasoning_text", "text": thought}]
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}
