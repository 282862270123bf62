"""Thoughts in an answer's text: ``<think>...</think>`` before the answer proper."""

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Splits an answer, as it arrives, into thoughts and what follows them.

    Thoughts are what stands before ``</think>``, if the prompt ends inside ``<think>`` (as templates of thinking
    models do) or the answer begins with it. Any other answer has none: a model that does not think is read as it is.
    White space before ``<think>`` belongs to neither part.
    """

    def __init__(self, prompt: str) -> None:
        """``prompt``: the rendered prompt, whose end tells whether the answer begins inside of the thoughts."""
        self._state = "thinking" if opens_thoughts(prompt) else "undecided"
        self._pending = ""

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """Take the next piece, ``last`` where none follows; returns what is now certain: (thoughts, answer)."""
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
    """Whether a prompt ends inside of thoughts."""
    return prompt.rstrip().endswith(OPEN)


def _begun_tag(text: str) -> int:
    """Characters at the end of ``text`` that may be the beginning of the closing tag."""
    return next((size for size in range(min(len(CLOSE) - 1, len(text)), 0, -1) if text.endswith(CLOSE[:size])), 0)
