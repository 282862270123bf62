"""Mixing tasksets by weights: exact shares, monotone, the same from any position on."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.tasks.selectors import Mixture

WEIGHTS = st.lists(st.sampled_from([0.1, 0.3, 0.5, 1, 2, 3, 7, 100]), min_size=1, max_size=5)


@given(weights=WEIGHTS, first=st.integers(0, 120), count=st.integers(0, 60))
def test_the_mixture_equals_its_definition(weights: list[float], first: int, count: int) -> None:
    """Sainte-Laguë: entry i takes its n-th task at (n + 1/2) / weight; the first entry wins ties."""
    order = sorted(
        ((Fraction(2 * number + 1) / Fraction(str(weight)), entry, number))
        for entry, weight in enumerate(weights)
        for number in range(first + count + 1)
    )
    mixture = Mixture.of(weights)
    assert mixture.entries(first, count) == [entry for _, entry, _ in order[first : first + count]]
    for entry in range(len(weights)):
        assert mixture.taken(entry, first) == sum(other == entry for _, other, _ in order[:first])
    for place, (_, entry, number) in enumerate(order[: first + count]):
        assert mixture.position(entry, number) == place


@pytest.mark.parametrize(
    ("weights", "expected"), [((3, 1), [0, 0, 1, 0] * 2), ((0.7, 0.3), [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]), ((5,), [0] * 4)]
)
def test_shares_are_those_of_the_weights(weights: tuple[float, ...], expected: list[int]) -> None:
    assert sorted(Mixture.of(weights).entries(0, len(expected))) == sorted(expected)
    assert Mixture.of(weights).entries(10**6 * len(expected), len(expected)) == Mixture.of(weights).entries(
        0, len(expected)
    )
