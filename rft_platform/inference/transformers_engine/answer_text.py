"""Convert sampled ids to the caller's text: cut at stop strings, with reasoning and tool calls separated.

Streamed and whole responses use the same code, so their texts are equal.
"""

from collections.abc import Callable, Sequence

from rft_platform.inference.transformers_engine.output_parsers import (
    ReasoningParser,
    ToolCall,
    ToolCallParser,
    cut_at_stop,
    held_back,
)

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # an incomplete character decodes to this


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
