"""Distribute the positions of an endless stream of tasks over several tasksets, in proportion to their weights.

The order is that of Sainte-Laguë's method: entry ``i`` takes its ``n``-th task (from 0) at ``(n + 1/2) / weight_i``.
After any number of tasks, the share of each entry is as near to its weight as whole tasks allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm


@dataclass(frozen=True, slots=True)
class Mixture:
    """Assigns each position of the stream to an entry. The assignment depends only on the weights."""

    weights: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Mixture":
        """The mixture of entries with these positive weights. Decimal fractions are represented exactly."""
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        return cls(tuple(int(weight * scale) for weight in exact))

    def position(self, entry: int, number: int) -> int:
        """The position of the ``number``-th task (from 0) of ``entry`` in the stream."""
        own = self.weights[entry]
        before = 0
        for other, weight in enumerate(self.weights):
            if other == entry:
                before += number
                continue
            # The tasks m of the other entry with (m + 1/2) / weight < (number + 1/2) / own; the first entry wins ties.
            whole, rest = divmod((2 * number + 1) * weight, own)
            odd_up_to = whole if rest or other < entry else whole - 1
            before += (odd_up_to + 1) // 2
        return before

    def taken(self, entry: int, positions: int) -> int:
        """Number of the first ``positions`` positions that ``entry`` takes."""
        number = positions * self.weights[entry] // sum(self.weights)
        while self.position(entry, number) < positions:
            number += 1
        while number and self.position(entry, number - 1) >= positions:
            number -= 1
        return number

    def entries(self, first: int, count: int) -> list[int]:
        """The entries that take ``count`` positions, starting with position ``first``."""
        found: dict[int, int] = {}
        for entry in range(len(self.weights)):
            number = self.taken(entry, first)
            while (place := self.position(entry, number)) < first + count:
                found[place] = entry
                number += 1
        return [found[place] for place in range(first, first + count)]
