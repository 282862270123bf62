"""The endpoint ``/v1/responses``: the request becomes a chat call to the engine, the chat answer becomes a response.

Neither engine returns token ids on its own responses endpoint, so the platform uses the chat endpoint of both engines.
Responses are not stored: a request that needs an earlier response (``previous_response_id``, item references) is
refused.
"""

from collections.abc import Iterator
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.openai_api.calls import CallDefaults, ChatCall
from rft_platform.openai_api.messages import Message, text_of, with_known_role
from rft_platform.openai_api.streams import named_event

#: Request fields that are translated, or that have no meaning here: no stored responses, hosted tools or accounts.
_CONSUMED = {
    "input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", "reasoning", "include", "store",
    "stream", "stream_options", "metadata", "truncation", "top_logprobs", "user", "safety_identifier", "service_tier",
    "prompt_cache_key", "prompt_cache_retention", "max_tool_calls", "previous_response_id", "conversation",
    "background", "prompt", "context_management",
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
#: Fields in which engines return the model's reasoning.
_THOUGHTS = ("reasoning_content", "reasoning")
#: Finish reasons of answers that are incomplete -> the reason that a response names.
_CUT: dict[str | None, str] = {"length": "max_output_tokens", "abort": "abort"}
_ECHOED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "reasoning", "user", "top_logprobs")


class ResponsesCall(ChatCall):
    """A response, sampled as a chat completion."""

    def __init__(self, body: dict[str, Any], defaults: CallDefaults) -> None:
        _refuse_what_needs_a_store(body)
        self._body = body
        super().__init__(_chat_body(body), defaults)
        self._builder = ResponseBuilder(body, defaults.shown_model or self.sent["model"])

    def msg_id(self, answer: dict[str, Any]) -> str:
        """The response's id."""
        return response_id(answer)

    def restored(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the response."""
        super().restored(answer)
        return self._builder.whole(answer)

    def event(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        """Return the events for one chunk of the chat answer."""
        super().restored(chunk)
        return self._builder.of_chunk(chunk)

    def other_event(self, event: bytes) -> bytes:
        """Return the last events instead of ``[DONE]``."""
        return self._builder.finish() if b"[DONE]" in event else b""


def _refuse_what_needs_a_store(body: dict[str, Any]) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise UserError(f"{name}: no response is stored here; send the whole conversation as `input` items instead")
    if body.get("background"):
        raise UserError("background: responses are only answered synchronously; leave it out")
    if body.get("truncation") not in (None, "disabled"):
        raise UserError(f"truncation {body['truncation']!r}: only 'disabled' is supported; shorten the input yourself")
    if (body.get("n") or 1) != 1:
        raise UserError("n: a response has one answer; send several requests, or use chat completions")


def _chat_body(body: dict[str, Any]) -> dict[str, Any]:
    chat = {name: value for name, value in body.items() if name not in _CONSUMED and value is not None}
    chat["messages"] = chat_messages(body.get("input"), body.get("instructions"))
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = [_chat_tool(tool) for tool in body["tools"]]
        if body.get("tool_choice") is not None:
            chat["tool_choice"] = _chat_tool_choice(body["tool_choice"])
    if (body.get("reasoning") or {}).get("effort") is not None:
        chat["reasoning_effort"] = body["reasoning"]["effort"]
    if (form := (body.get("text") or {}).get("format")) is not None and form.get("type") != "text":
        chat["response_format"] = _response_format(form)
    if _LOGPROBS in (body.get("include") or []) or body.get("top_logprobs"):
        chat["logprobs"], chat["top_logprobs"] = True, body.get("top_logprobs") or 0
    if body.get("stream"):
        chat["stream"], chat["stream_options"] = True, {"include_usage": True}
    return chat


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or "name" not in tool:
        raise UserError(f"tools: {tool.get('type')!r} is a tool that OpenAI hosts; only functions with a name run here")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _chat_tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise UserError(f"tool_choice {choice!r}: expected 'auto', 'none', 'required' or a function")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    names = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in names if form.get(name) is not None}}


def chat_messages(items: Any, instructions: Any = None) -> list[Message]:
    """Return the conversation. The tool calls and the text of one turn become one assistant message.

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
        message = with_known_role({"role": item.get("role"), "content": text_of(item.get("content"))})
        if message["role"] == "assistant" and _is_open(messages):
            messages[-1]["content"] = (messages[-1]["content"] or "") + message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text_of(item.get("output"))})
    elif kind == "reasoning":
        if thought := "".join(str(part.get("text") or "") for part in item.get("content") or []):
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})
    else:
        raise UserError(
            f"input: items of type {kind!r} are not supported; send messages, function_call, function_call_output or "
            "reasoning items, in full, because no items are stored here"
        )


def _is_open(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message has reasoning or open calls, so that the following text belongs to the same message."""
    return bool(messages) and not {"reasoning_content", "tool_calls"}.isdisjoint(messages[-1])


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant message that a tool call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def response_id(answer: dict[str, Any]) -> str:
    """Id of the response made from a chat answer."""
    return "resp_" + str(answer["id"]).removeprefix("chatcmpl-")


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


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """The token counts of a chat answer in the form of a response."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


Event = tuple[str, dict[str, Any]]  # kind and fields


class ResponseBuilder:
    """Builds a response from a chat answer, whole or in chunks, and the events of its growth.

    The first piece of an item opens the item; the next item closes it.
    """

    def __init__(self, body: dict[str, Any], model: str) -> None:
        self._body = body
        self._model = model
        self._number = 0  # of the next event
        self._frame: dict[str, Any] = {}
        self._item: dict[str, Any] | None = None  # the open item
        self._call = -1  # index of the open function call
        self._reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._failed = False

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the response made from a whole chat answer."""
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
        piece = {**choice, "delta": {**message, "tool_calls": calls}}
        for _ in (*self._grow({**answer, "choices": [piece]}), *self._finish()):
            pass
        return self._frame

    def of_chunk(self, chunk: dict[str, Any]) -> bytes:
        """Return the events for one chunk of a streamed chat answer."""
        return self._written(self._grow(chunk))

    def finish(self) -> bytes:
        """Return the last events; none after an error."""
        return self._written(self._finish())

    def _written(self, events: Iterator[Event]) -> bytes:
        out = b""
        for kind, fields in events:
            out += named_event(kind, {"type": kind, "sequence_number": self._number, **fields})
            self._number += 1
        return out

    def _grow(self, chunk: dict[str, Any]) -> Iterator[Event]:
        if "error" in chunk:
            self._failed = True
            yield "error", {name: chunk["error"].get(name) for name in ("code", "message", "param")}
            return
        if not self._frame:
            self._frame = response_frame(self._body, {"model": self._model, **chunk})
            yield "response.created", {"response": self._frame}
            yield "response.in_progress", {"response": self._frame}
        self._usage = chunk.get("usage") or self._usage
        for piece in chunk.get("choices") or []:
            yield from self._delta(piece.get("delta") or {}, (piece.get("logprobs") or {}).get("content") or [])
            self._reason = piece.get("finish_reason") or self._reason

    def _finish(self) -> Iterator[Event]:
        if not self._frame or self._failed:
            return
        items = [*self._frame["output"], *([] if self._item is None else [self._item])]
        if all(item["type"] == "reasoning" for item in items):  # an answer without text or calls has an empty message
            yield from self._text("message", "", [])
        yield from self._close()
        cut = self._reason in _CUT
        self._frame["usage"] = None if self._usage is None else usage_of(self._usage)
        self._frame["status"] = "incomplete" if cut else "completed"
        self._frame["incomplete_details"] = {"reason": _CUT[self._reason]} if cut else None
        yield f"response.{self._frame['status']}", {"response": self._frame}

    def _delta(self, delta: dict[str, Any], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if thought := next((delta[name] for name in _THOUGHTS if delta.get(name)), None):
            yield from self._text("reasoning", thought, [])
        if delta.get("content"):
            yield from self._text("message", delta["content"], logprobs)
        for call in delta.get("tool_calls") or []:
            yield from self._function_call(call)

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if self._item is None or self._item["type"] != kind:
            fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._close()
            before = sum(item["type"] == kind for item in self._frame["output"])
            number = f"_{before}" if before else ""  # ids differ, if text follows a tool call
            yield from self._open("msg" if kind == "message" else "rs", kind, number, content=[], **fields)
        assert self._item is not None
        part, place = self._item["content"][0], {**self._place(), "content_index": 0}
        part["text"] += text
        if kind == "reasoning":
            yield "response.reasoning_text.delta", {**place, "delta": text}
        elif text:
            part["logprobs"] += logprobs
            yield "response.output_text.delta", {**place, "delta": text, "logprobs": logprobs}

    def _function_call(self, piece: dict[str, Any]) -> Iterator[Event]:
        function = piece.get("function") or {}
        if piece["index"] != self._call:
            self._call = piece["index"]
            named = {"call_id": piece.get("id"), "name": function.get("name") or "", "arguments": ""}
            yield from self._open("fc", "function_call", f"_{self._call}", **named)
        assert self._item is not None
        if arguments := function.get("arguments"):
            self._item["arguments"] += arguments
            yield "response.function_call_arguments.delta", {**self._place(), "delta": arguments}

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._frame["output"])}

    def _open(self, prefix: str, kind: str, number: str = "", **fields: Any) -> Iterator[Event]:
        """Close the open item and open one of this kind, with an empty part if it has content."""
        yield from self._close()
        item_id = f"{prefix}_{self._frame['id'].removeprefix('resp_')}{number}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        index = self._place()["output_index"]
        yield "response.output_item.added", {"output_index": index, "item": self._item}
        if kind == "function_call":
            return
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        part = part if kind == "message" else {"type": "reasoning_text", "text": ""}
        yield "response.content_part.added", {**self._place(), "content_index": 0, "part": part}
        self._item["content"] = [part]

    def _close(self) -> Iterator[Event]:
        """Close the open item, if any."""
        if self._item is None:
            return
        item, place = self._item, self._place()
        item["status"] = "incomplete" if self._reason in _CUT else "completed"
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **done}
        else:
            part, inside = item["content"][0], {**place, "content_index": 0}
            logprobs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield f"response.{part['type']}.done", {**inside, "text": part["text"], **logprobs}
            yield "response.content_part.done", {**inside, "part": part}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}
        self._frame["output"].append(item)
        self._item = None
