"""Parse Hermes tool calls in a model's output: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; ``arguments`` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_dict(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallParser:
    """Splits an answer, as it arrives, into text and complete tool calls.

    White space around a call belongs to neither. A tagged body that is not valid JSON with a name stays text.
    """

    def __init__(self) -> None:
        self._pending = ""  # undecided text: an open call, the beginning of a tag, or white space
        self._after_call = False

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add the next piece; returns the parts that are now certain: (text, calls)."""
        self._pending += text
        shown, calls = "", []
        while (start := self._pending.find(OPEN)) >= 0:
            end = self._pending.find(CLOSE, start)
            if end < 0:
                break
            call = parse_call(self._pending[start + len(OPEN) : end])
            end += len(CLOSE)
            if call is None:
                shown += self._text(self._pending[:end])
            else:
                shown += self._text(self._pending[:start].rstrip())
                calls.append(call)
                self._after_call = True
            self._pending = self._pending[end:]
        certain = self._pending[: _certain(self._pending)]
        self._pending = self._pending[len(certain) :]
        return shown + self._text(certain), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """End the answer; returns the undecided rest as (text, calls). A last call may lack its closing tag."""
        rest, self._pending = self._pending, ""
        before, tag, body = rest.partition(OPEN)
        call = parse_call(body) if tag else None
        if call is not None:
            return self._text(before.rstrip()), [call]
        return self._text(rest), []

    def _text(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text


def parse_tool_calls(text: str) -> tuple[str | None, list[ToolCall]]:
    """(text outside the calls, calls) of a whole answer; the text is None if there are calls but no text."""
    parser = ToolCallParser()
    parts = [parser.feed(text), parser.finish()]
    content = "".join(shown for shown, _ in parts)
    calls = [call for _, found in parts for call in found]
    return (content or None if calls else content), calls


def parse_call(body: str) -> ToolCall | None:
    """Parse the text between the tags; None if it is not a call."""
    try:
        value = json.loads(body)
    except json.JSONDecodeError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return ToolCall(
        value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


def _certain(pending: str) -> int:
    """Number of characters at the start of ``pending`` that belong neither to a tag nor to white space before one."""
    start = pending.find(OPEN)
    if start < 0:
        start = len(pending) - next(
            (size for size in range(min(len(OPEN) - 1, len(pending)), 0, -1) if pending.endswith(OPEN[:size])), 0
        )
    return len(pending[:start].rstrip())
