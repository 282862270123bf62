"""From sampled ids to text, as they arrive: stop strings, reasoning (``<think>...</think>``), and tool calls.

Tool calls have the Hermes form ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. Streamed and whole answers
use the same code, so their texts are equal.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to this
SLACK = 4  # more tokens, because tokens at the window's start may decode to nothing or to part of a character


class StopWatch:
    """Detects stop strings in one sequence, over a window of its latest tokens."""

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.stops = tuple(stops)
        self.decode = decode
        self.window = max(len(stop.encode()) for stop in stops) + SLACK  # a token has at least one byte
        self.recent: list[int] = []

    def hit(self, token_id: int) -> bool:
        """Add the next token; True if the text now contains a stop string."""
        self.recent = [*self.recent, token_id][-self.window :]
        text = self.decode(self.recent)
        return any(stop in text for stop in self.stops)


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """``text`` up to the first stop string, and whether there was one."""
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of ``text`` that may begin one of ``stops`` and must not be returned yet."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


class ReasoningParser:
    """Splits a model's output, as it arrives, into reasoning and answer.

    The text before ``</think>`` is reasoning if the prompt ends with ``<think>`` (as in templates of thinking models)
    or the output begins with ``<think>``. Any other output has no reasoning and is returned unchanged. White space
    before ``<think>`` is dropped.
    """

    def __init__(self, prompt: str) -> None:
        """``prompt``: the rendered prompt. The output begins with reasoning if the prompt ends with ``<think>``."""
        self._state = "thinking" if opens_thoughts(prompt) else "undecided"
        self._pending = ""

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """Add the next piece (``last``: none follows); returns the parts that are now certain: (reasoning, answer)."""
        self._pending += text
        if self._state == "undecided":
            self._decide(last)
        if self._state == "undecided":
            return "", ""
        thoughts = self._thoughts(last) if self._state == "thinking" else ""
        answer = ""
        if self._state == "answering":
            answer, self._pending = self._pending, ""
        return thoughts, answer

    def _decide(self, last: bool) -> None:
        begun = self._pending.lstrip()
        if begun.startswith(THINK_OPEN):
            self._state, self._pending = "thinking", begun[len(THINK_OPEN) :]
        elif last or not THINK_OPEN.startswith(begun):
            self._state = "answering"

    def _thoughts(self, last: bool) -> str:
        thoughts, closed, rest = self._pending.partition(THINK_CLOSE)
        if closed:
            self._state, self._pending = "answering", rest
            return thoughts
        kept = 0 if last else held_back(thoughts, (THINK_CLOSE,))
        certain = thoughts[: len(thoughts) - kept]
        self._pending = thoughts[len(certain) :]
        return certain


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends with ``<think>``."""
    return prompt.rstrip().endswith(THINK_OPEN)


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

    White space around a call is dropped. If the body between the tags is not valid JSON with a name, it stays text.
    """

    def __init__(self) -> None:
        self._pending = ""  # undecided text: an open call, the beginning of a tag, or white space
        self._after_call = False

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add the next piece; returns the parts that are now certain: (text, calls)."""
        self._pending += text
        shown, calls = "", []
        while (start := self._pending.find(CALL_OPEN)) >= 0:
            end = self._pending.find(CALL_CLOSE, start)
            if end < 0:
                break
            call = parse_call(self._pending[start + len(CALL_OPEN) : end])
            end += len(CALL_CLOSE)
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
        before, tag, body = rest.partition(CALL_OPEN)
        call = parse_call(body) if tag else None
        if call is not None:
            return self._text(before.rstrip()), [call]
        return self._text(rest), []

    def _text(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text


def parse_call(body: str) -> ToolCall | None:
    """Parse the text between the tags; None if it is not a call."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):  # no JSON, a number of too many digits, or too deep for Python
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return ToolCall(
        value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )


def _certain(pending: str) -> int:
    """Number of characters at the start of ``pending`` that belong neither to a tag nor to white space before one."""
    start = pending.find(CALL_OPEN)
    if start < 0:
        start = len(pending) - held_back(pending, (CALL_OPEN,))
    return len(pending[:start].rstrip())


def forced_beginning(tool: str) -> str:
    """The beginning of an answer that must call ``tool``, or any tool if ``tool`` is empty.

    The beginning ends at a token boundary: the model samples the following space, which is part of the token `` {"``.
    """
    return f"{CALL_OPEN}\n" + (f'{{"name": {json.dumps(tool, ensure_ascii=False)}, "arguments":' if tool else "")


class TextStream:
    """Decodes ids as they arrive, in pieces that end at whole characters.

    Each piece is decoded together with the previous one, because tokenizers treat the first token of a text
    differently (for example its leading space).
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # number of ids whose text has been returned
        self._context = 0  # index of the previous piece's first id

    def feed(self, ids: Sequence[int], last: bool) -> str:
        """The text that ``ids`` add."""
        self._ids += ids
        known = self._decode(self._ids[self._context : self._shown])
        text = self._decode(self._ids[self._context :])
        if not last and (len(text) <= len(known) or text.endswith(INCOMPLETE)):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(known) :]


class AnswerText:
    """Converts the ids of one choice to (text, tool calls); ``thoughts`` is the reasoning in the last ``feed``."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str],
        parser: ToolCallParser | None,
        prefix: str = "",
        reasoning: ReasoningParser | None = None,
    ) -> None:
        """``parser``: None if the request offers no tools; ``reasoning``: None if reasoning stays in the answer.

        ``prefix``: the forced beginning of the answer, which is part of the prompt.
        """
        self._stream = TextStream(decode)
        self._stops = stops
        self._parser = parser
        self._reasoning = reasoning
        self.thoughts = ""
        self._pending = ""
        self._stopped = False
        self.called = False
        if parser is not None and prefix:
            parser.feed(prefix)

    def feed(self, ids: Sequence[int], last: bool) -> tuple[str, list[ToolCall]]:
        """The (text, tool calls) that ``ids`` add; ``last``: no more ids follow."""
        text = self._until_stop(self._stream.feed(ids, last), last)
        if self._reasoning is not None:
            self.thoughts, text = self._reasoning.feed(text, last)
        if self._parser is None:
            return text, []
        shown, calls = self._parser.feed(text)
        if last:
            rest, more = self._parser.finish()
            shown, calls = shown + rest, calls + more
        self.called = self.called or bool(calls)
        return shown, calls

    def finish_reason(self, reason: str) -> str:
        """The finish reason for the caller: "tool_calls" instead of "stop" if the answer contains a tool call."""
        return "tool_calls" if self.called and reason == "stop" else reason

    def _until_stop(self, text: str, last: bool) -> str:
        if self._stopped or not self._stops:
            return "" if self._stopped else text
        self._pending, self._stopped = cut_at_stop(self._pending + text, self._stops)
        hold = 0 if last or self._stopped else held_back(self._pending, self._stops)
        shown = self._pending[: len(self._pending) - hold]
        self._pending = self._pending[len(shown) :]
        return shown
