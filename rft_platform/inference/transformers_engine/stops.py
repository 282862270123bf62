"""Stop strings: detect them while tokens arrive, and cut them from the returned text."""

from collections.abc import Callable, Sequence

SLACK = 4  # for tokens at the window's edge that decode to nothing or to part of a character


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
    """Number of characters at the end of ``text`` that may begin a stop string and must not be returned yet."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
