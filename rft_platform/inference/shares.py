"""Splitting a batch over engines: neighbours stay together, and the loads come out level."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Sequences below which a batch is not split: a decode step of so few takes hardly longer than that of one, so two
#: engines would not be faster than one.
ROWS_A_SHARE = 8


@dataclass(frozen=True, slots=True)
class Share:
    """Items ``start`` to ``stop`` (exclusive) of a batch, and what they cost together in tokens."""

    start: int
    stop: int
    cost: int


def divide(costs: Sequence[int], rows: int, loads: Sequence[int]) -> list[Share]:
    """One share for each of the first engines of ``loads`` (ascending, in tokens); no more shares than are worth it.

    ``rows`` are the sequences that each item stands for. An item is never split: the answers to one prompt share its
    computation.
    """
    useful = max(1, min(len(loads), len(costs), len(costs) * rows // ROWS_A_SHARE))
    wanted = level(sum(costs), loads[:useful])
    ends = list(accumulate(costs, initial=0))
    shares, start, due = [], 0, 0.0
    for number, amount in enumerate(wanted):
        due += amount
        stop = len(costs) if number == len(wanted) - 1 else _cut(ends, due, start)
        if stop > start:
            shares.append(Share(start, stop, ends[stop] - ends[start]))
            start = stop
    return shares


def level(amount: float, loads: Sequence[int]) -> list[float]:
    """How much of ``amount`` each of the ascending ``loads`` is given so that all that get some end up level."""
    for count in range(len(loads), 0, -1):
        height = (amount + sum(loads[:count])) / count
        if height >= loads[count - 1]:
            return [height - load for load in loads[:count]]
    return [amount]


def _cut(ends: Sequence[int], due: float, start: int) -> int:
    """The boundary between items that comes nearest to ``due`` tokens from the start of the batch."""
    return min(range(start, len(ends)), key=lambda place: abs(ends[place] - due))
