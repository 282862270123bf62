"""Stop strings: noticed while tokens arrive, cut off when the text is shown."""

from collections.abc import Callable, Sequence

SLACK = 4  # tokens that decode to nothing, or to a part of a character, at the window's edge


class StopWatch:
    """Watches one sequence for the end of a stop string, over a window of its latest tokens."""

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.stops = tuple(stops)
        self.decode = decode
        self.window = max(len(stop.encode()) for stop in stops) + SLACK  # a token is a byte at least
        self.recent: list[int] = []

    def hit(self, token_id: int) -> bool:
        """Take the next token; True when the text now holds a stop string."""
        self.recent = [*self.recent, token_id][-self.window :]
        text = self.decode(self.recent)
        return any(stop in text for stop in self.stops)


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """``text`` up to the first stop string, and whether there was one."""
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may still become a stop string, so must not be shown yet."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
