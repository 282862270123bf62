"""Convert the chunks of a streamed chat answer to the events of a streamed response."""

from typing import Any

from rft_platform.rollout.endpoints.events import named_event
from rft_platform.rollout.endpoints.responses_answer import (
    THOUGHTS,
    call_item,
    closed,
    message_item,
    reasoning_item,
    response_frame,
    text_part,
)


class ResponseEvents:
    """Writes the events of one response. The first piece of an item opens the item; the next item closes it."""

    def __init__(self, body: dict[str, Any], model: str) -> None:
        self._body = body
        self._model = model
        self._number = 0
        self._frame: dict[str, Any] | None = None
        self._item: dict[str, Any] | None = None  # the open item
        self._call = -1  # index of the open function call
        self._reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self._failed = False

    def of_chunk(self, chunk: dict[str, Any]) -> bytes:
        """Return the events for one chunk."""
        if "error" in chunk:
            self._failed = True
            error = chunk["error"]
            return self._event("error", code=error.get("code"), message=error.get("message"), param=error.get("param"))
        out = self._begin(chunk)
        self._usage = chunk.get("usage") or self._usage
        for piece in chunk.get("choices") or []:
            out += self._delta(piece.get("delta") or {}, (piece.get("logprobs") or {}).get("content") or [])
            self._reason = piece.get("finish_reason") or self._reason
        return out

    def finish(self) -> bytes:
        """Return the last events; none after an error."""
        if self._frame is None or self._failed:
            return b""
        frame, out = self._frame, b""
        if self._item is None and not frame["output"]:  # an empty answer becomes an empty message
            out += self._open(message_item(f"msg_{self._suffix}", [], "in_progress"))
        out += self._close()
        closed(frame, self._reason, self._usage)
        return out + self._event(f"response.{frame['status']}", response=frame)

    @property
    def _suffix(self) -> str:
        return str((self._frame or {"id": ""})["id"]).removeprefix("resp_")

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _begin(self, chunk: dict[str, Any]) -> bytes:
        if self._frame is not None:
            return b""
        self._frame = response_frame(self._body, {"model": self._model, **chunk})
        created = self._event("response.created", response=self._frame)
        return created + self._event("response.in_progress", response=self._frame)

    def _delta(self, delta: dict[str, Any], logprobs: list[dict[str, Any]]) -> bytes:
        out = b""
        for name in THOUGHTS:
            if delta.get(name):
                out += self._text("reasoning", delta[name], [])
                break
        if delta.get("content"):
            out += self._text("message", delta["content"], logprobs)
        for call in delta.get("tool_calls") or []:
            out += self._function_call(call)
        return out

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        out = b""
        if self._item is None or self._item["type"] != kind:
            item = (
                message_item(f"msg_{self._suffix}", [], "in_progress")
                if kind == "message"
                else {**reasoning_item(f"rs_{self._suffix}", "", "in_progress"), "content": []}
            )
            out = self._close() + self._open(item)
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return out + self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)
        part["logprobs"] += logprobs
        place = {**self._place(), "content_index": 0}
        return out + self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def _function_call(self, piece: dict[str, Any]) -> bytes:
        function, out = piece.get("function") or {}, b""
        if piece["index"] != self._call:
            self._call = piece["index"]
            call = {"id": piece.get("id"), "function": {"name": function.get("name") or "", "arguments": ""}}
            out = self._close() + self._open(call_item(f"fc_{self._suffix}_{self._call}", call, "in_progress"))
        assert self._item is not None
        arguments = function.get("arguments") or ""
        self._item["arguments"] += arguments
        delta = self._event("response.function_call_arguments.delta", **self._place(), delta=arguments)
        return out + (delta if arguments else b"")

    def _place(self) -> dict[str, Any]:
        assert self._item is not None and self._frame is not None
        return {"item_id": self._item["id"], "output_index": len(self._frame["output"])}

    def _open(self, item: dict[str, Any]) -> bytes:
        self._item = item
        index = self._place()["output_index"]
        out = self._event("response.output_item.added", output_index=index, item=item)
        if item["type"] == "function_call":
            return out
        part = text_part("", []) if item["type"] == "message" else {"type": "reasoning_text", "text": ""}
        out += self._event("response.content_part.added", **self._place(), content_index=0, part=part)
        item["content"] = [part]
        return out

    def _close(self) -> bytes:
        """Close the open item, if any."""
        if self._item is None or self._frame is None:
            return b""
        item, place = self._item, self._place()
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        if item["type"] == "function_call":
            whole = {"name": item["name"], "arguments": item["arguments"]}
            out = self._event("response.function_call_arguments.done", **place, **whole)
        else:
            part, inside = item["content"][0], {**place, "content_index": 0}
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            out = self._event(f"response.{kind}.done", **inside, text=part["text"], **more)
            out += self._event("response.content_part.done", **inside, part=part)
        out += self._event("response.output_item.done", output_index=place["output_index"], item=item)
        self._frame["output"].append(item)
        self._item = None
        return out
