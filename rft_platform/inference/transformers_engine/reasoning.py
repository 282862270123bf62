"""Separate a model's reasoning, ``<think>...</think>``, from the answer that follows it."""

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Splits a model's output, as it arrives, into reasoning and answer.

    The text before ``</think>`` is reasoning if the prompt ends with ``<think>`` (as in templates of thinking models)
    or the output begins with ``<think>``. Any other output has no reasoning and is returned unchanged. White space
    before ``<think>`` belongs to neither part.
    """

    def __init__(self, prompt: str) -> None:
        """``prompt``: the rendered prompt; its end shows whether the output begins inside the reasoning."""
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
        if begun.startswith(OPEN):
            self._state, self._pending = "thinking", begun[len(OPEN) :]
        elif last or not OPEN.startswith(begun):
            self._state = "answering"

    def _thoughts(self, last: bool) -> str:
        thoughts, closed, rest = self._pending.partition(CLOSE)
        if closed:
            self._state, self._pending = "answering", rest
            return thoughts
        kept = 0 if last else _begun_tag(thoughts)
        certain = thoughts[: len(thoughts) - kept]
        self._pending = thoughts[len(certain) :]
        return certain


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends with ``<think>``."""
    return prompt.rstrip().endswith(OPEN)


def _begun_tag(text: str) -> int:
    """Number of characters at the end of ``text`` that may begin the closing tag."""
    return next((size for size in range(min(len(CLOSE) - 1, len(text)), 0, -1) if text.endswith(CLOSE[:size])), 0)
