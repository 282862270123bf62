"""Aggregation modes against their plain formulas, and their independence of any split."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.algorithms.aggregation import MODES, Aggregation
from rft_platform.common.errors import UserError

FORMULAS = {
    "token-mean": lambda rows: np.concatenate(rows).mean(),
    "seq-mean-token-mean": lambda rows: np.mean([row.mean() for row in rows]),
    "seq-mean-token-sum": lambda rows: np.mean([row.sum() for row in rows]),
    "seq-mean-token-sum-norm": lambda rows: np.mean([row.sum() / 10 for row in rows]),
}


def partial(rows: list[np.ndarray], mode: Aggregation, tokens: float, count: float) -> float:
    """What one micro-batch adds, given the global counts."""
    weights = mode.weights(np.array([len(row) for row in rows]))
    return sum(w * row.sum() for w, row in zip(weights, rows, strict=True)) / mode.normaliser(tokens, count)


@pytest.mark.parametrize("mode", MODES)
@given(
    rows=st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6).map(np.array), min_size=1, max_size=8),
    cut=st.integers(0, 8),
)
def test_any_split_gives_the_formula(mode: str, rows: list[np.ndarray], cut: int) -> None:
    aggregation = Aggregation(mode, 10)
    tokens, count = sum(map(len, rows)), len(rows)
    got = partial(rows[:cut], aggregation, tokens, count) + partial(rows[cut:], aggregation, tokens, count)
    assert got == pytest.approx(FORMULAS[mode](rows), abs=1e-9)


def test_unknown_mode_and_missing_length_are_user_errors() -> None:
    with pytest.raises(UserError, match="did you mean 'token-mean'"):
        Aggregation("token_mean")
    with pytest.raises(UserError, match="constant length"):
        Aggregation("seq-mean-token-sum-norm")
