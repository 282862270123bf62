"""From sampled ids to text, as they arrive: stop strings, reasoning (``<think>...</think>``), and tool calls.

Tool calls have the Hermes form ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. Streamed and whole answers
use the same code, so their texts are equal.
"""

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from rft_platform.common.json_codec import parse

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
TAGS = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to this
SLACK = 4  # more tokens, because tokens at the window's start may decode to nothing or to part of a character

ToolCall = dict[str, Any]  # in the form of OpenAI's API, with the arguments as JSON text


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


class OutputParser:
    """Splits a model's output, as it arrives, into reasoning, text and complete tool calls.

    The text before ``</think>`` is reasoning if the prompt ends with ``<think>`` (as in templates of thinking models)
    or the output begins with ``<think>``, after white space at most. A call whose body is not valid JSON with a name
    stays text; the last call may lack its closing tag. White space around calls is dropped.
    """

    def __init__(self, begun: str = "", *, reasoning: bool = False, tools: bool = False) -> None:
        """``begun``: the beginning of the output that the prompt already has: ``<think>`` or that of a call.

        Without ``reasoning`` or ``tools`` their tags are text.
        """
        from transformers.utils.chat_parsing import ResponseParser

        text = {"content": "text", "content_args": {"strip": False}}
        fields: dict[str, dict[str, Any]] = {"content": text}
        if reasoning:
            fields["thinking"] = {**text, "open_pattern": rf"\A\s*{THINK_OPEN}", "close": THINK_CLOSE}
        if tools:
            fields["calls"] = {**text, "open": CALL_OPEN, "close": CALL_CLOSE, "repeats": True}
        self._parser = ResponseParser({"start_anchor": "\0", "fields": fields}, prefix=begun)
        self._space = ""  # white space at the end of the text so far, which a call would drop
        self._after_call = False

    def feed(self, text: str, last: bool) -> tuple[str, str, list[ToolCall]]:
        """Add the next piece (``last``: none follows); returns what is now certain: (reasoning, text, calls)."""
        thoughts, shown, calls = "", "", []
        events = [(event, CALL_CLOSE) for event in self._parser.feed(text)]
        if last:
            events += [(event, "") for event in self._parser.finalize()[1]]
        for event, close in events:
            kind = event["type"], event["field"]
            if kind == ("region_chunk", "thinking"):
                thoughts += event["text"]
            elif kind == ("region_chunk", "content"):
                shown += self._text(event["text"])
            elif kind == ("region_close", "calls"):
                call = parse_call(event["value"])
                if call is None:
                    shown += self._text(f"{CALL_OPEN}{event['value']}{close}")
                else:
                    calls.append(call)
                    self._space, self._after_call = "", True
        return thoughts, shown + (self._space if last else ""), calls

    def _text(self, text: str) -> str:
        """The part of a piece of text that is certain; white space at its end is kept for later."""
        text = self._space + (text.lstrip() if self._after_call else text)
        self._after_call = self._after_call and not text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown


def parse_call(body: str) -> ToolCall | None:
    """Parse the text between the tags; None if it is not a call. The arguments are text that every client can parse."""
    try:
        value = parse(body)
    except ValueError:  # no JSON, NaN, a number of too many digits, or nested too deeply
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments")
    arguments = {} if arguments is None else arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": value["name"], "arguments": text}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


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
    """Converts the ids of one choice to reasoning, text and tool calls."""

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str], parser: OutputParser | None = None
    ) -> None:
        """``parser``: None if neither reasoning nor tool calls are separated from the text."""
        self._stream = TextStream(decode)
        self._stops = stops
        self._parser = parser
        self._pending = ""
        self._stopped = False
        self.called = False

    def feed(self, ids: Sequence[int], last: bool) -> tuple[str, str, list[ToolCall]]:
        """The (reasoning, text, tool calls) that ``ids`` add; ``last``: no more ids follow."""
        text = self._until_stop(self._stream.feed(ids, last), last)
        if self._parser is None:
            return "", text, []
        found = self._parser.feed(text, last)
        self.called = self.called or bool(found[2])
        return found

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
