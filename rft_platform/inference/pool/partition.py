"""Split a batch over engines: each share is a contiguous range of items, and the resulting loads are balanced."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Each share of a batch has at least about this many sequences. A decode step of so few sequences takes hardly longer
#: than a step of one sequence, so smaller shares would not be faster.
ROWS_A_SHARE = 8


@dataclass(frozen=True, slots=True)
class Share:
    """Items ``start`` to ``stop`` (exclusive) of a batch, and their total cost in tokens."""

    start: int
    stop: int
    cost: int


def partition(costs: Sequence[int], rows: int, loads: Sequence[int]) -> list[Share]:
    """Return shares of the batch: one for each of the first engines of ``loads`` (in tokens, ascending).

    ``costs``: tokens of each item; ``rows``: sequences per item. ``ROWS_A_SHARE`` limits the number of shares. An item
    is never split, because the answers to one prompt share the prompt's computation.
    """
    useful = max(1, min(len(loads), len(costs), len(costs) * rows // ROWS_A_SHARE))
    targets = level(sum(costs), loads[:useful])
    ends = list(accumulate(costs, initial=0))
    shares, start, due = [], 0, 0.0
    for number, amount in enumerate(targets):
        due += amount
        stop = len(costs) if number == len(targets) - 1 else _cut(ends, due, start)
        if stop > start:
            shares.append(Share(start, stop, ends[stop] - ends[start]))
            start = stop
    return shares


def level(amount: float, loads: Sequence[int]) -> list[float]:
    """Distribute ``amount`` over the smallest ``loads`` (ascending) so that all loads that get a part become equal."""
    for count in range(len(loads), 0, -1):
        height = (amount + sum(loads[:count])) / count
        if height >= loads[count - 1]:
            return [height - load for load in loads[:count]]
    return [amount]


def _cut(ends: Sequence[int], due: float, start: int) -> int:
    """The item boundary nearest to ``due`` tokens from the start of the batch, not before ``start``."""
    return min(range(start, len(ends)), key=lambda place: abs(ends[place] - due))
