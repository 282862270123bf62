"""Selection of tokens by covariance over a whole step: against plain sorting, and for tokens spread over ranks."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.algorithms.losses.entropy import in_band, kth_largest, largest
from rft_platform.algorithms.losses.registry import StepTokens, bind
from rft_platform.common.errors import UserError

Total = Callable[[np.ndarray], np.ndarray]


def alone(values: np.ndarray) -> np.ndarray:
    return values


def on_ranks(parts: list[np.ndarray], work: Callable[[np.ndarray, Total], np.ndarray]) -> list[np.ndarray]:
    """``work(part, total)`` of every part in a thread of its own; ``total`` sums over the threads."""
    barrier, given, found = threading.Barrier(len(parts)), {}, {}

    def run(rank: int) -> None:
        def total(values: np.ndarray) -> np.ndarray:
            given[rank] = values.copy()
            barrier.wait(30)
            summed: np.ndarray = sum(given[other] for other in range(len(parts)))  # type: ignore[assignment]
            barrier.wait(30)
            return summed

        found[rank] = work(parts[rank], total)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(len(parts))]


@given(st.lists(st.floats(allow_nan=False, width=32), max_size=40), st.integers(1, 45))
def test_the_kth_largest_is_that_of_sorting(values: list[float], k: int) -> None:
    got = kth_largest(np.array(values), k, alone)
    assert got == (sorted(values, reverse=True)[k - 1] if k <= len(values) else -np.inf)


def naive_covariances(logp: np.ndarray, advantage: np.ndarray) -> list[float]:
    n = len(logp)
    x, y = sum(logp) / n, sum(advantage) / n
    return [(a - x) * (b - y) for a, b in zip(logp, advantage, strict=True)]


def some_tokens(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([-rng.exponential(2.0, count), rng.normal(size=count), rng.random(count)])


@pytest.mark.parametrize("parts", [[300], [100, 0, 200], [1, 299]])
@pytest.mark.parametrize("select_ratio", [0.002, 0.05, 0.9])
def test_tokens_are_selected_over_all_ranks(parts: list[int], select_ratio: float) -> None:
    columns = some_tokens(1, 300)
    covariance = naive_covariances(*columns[:2])
    wanted = max(1, int(select_ratio * 300))
    by_size = sorted(range(300), key=lambda i: covariance[i], reverse=True)[:wanted]
    inside = [i for i in range(300) if 0.3 < covariance[i] < 2.0]
    by_draw = sorted(inside, key=lambda i: columns[2][i], reverse=True)[:wanted]
    split = np.split(columns, np.cumsum(parts)[:-1], axis=1)
    got = on_ranks(split, lambda part, total: largest(StepTokens(*part, total), select_ratio=select_ratio))
    assert np.flatnonzero(np.concatenate(got)).tolist() == sorted(by_size)
    band = {"select_ratio": select_ratio, "cov_low": 0.3, "cov_high": 2.0}
    got = on_ranks(split, lambda part, total: in_band(StepTokens(*part, total), **band))
    assert np.flatnonzero(np.concatenate(got)).tolist() == sorted(by_draw)
    assert 0 < len(by_draw) <= wanted


@pytest.mark.parametrize("parts", [[300], [100, 0, 200], [1, 299]])
@pytest.mark.parametrize("advantage", [0.0, -0.0, 1.0, 0.1])
def test_equal_advantages_select_the_same_number_of_tokens(parts: list[int], advantage: float) -> None:
    """All covariances are 0 or the rounding error of the mean."""
    columns = some_tokens(3, 300)
    columns[1] = advantage
    split = np.split(columns, np.cumsum(parts)[:-1], axis=1)
    got = on_ranks(split, lambda part, total: largest(StepTokens(*part, total), select_ratio=0.05))
    assert np.concatenate(got).sum() == 15
    if not advantage:  # the draws decide, which do not depend on the ranks
        assert set(np.flatnonzero(np.concatenate(got))) == set(np.argsort(columns[2])[-15:])
    band = {"select_ratio": 0.05, "cov_low": 0.3, "cov_high": 2.0}
    got = on_ranks(split, lambda part, total: in_band(StepTokens(*part, total), **band))
    assert not np.concatenate(got).any()


@pytest.mark.parametrize("parts", [[40], [13, 0, 27]])
def test_of_tokens_with_equal_covariances_draws_choose(parts: list[int]) -> None:
    logp = np.repeat([-3.0, -1.0, -2.0, -2.0], 10)
    advantage = np.repeat([-1.0, 1.0, -2.0, 2.0], 10)  # covariances: 1 of the first 20 tokens, 0 of the others
    draw = np.random.default_rng(4).random(40)
    split = np.split(np.stack([logp, advantage, draw]), np.cumsum(parts)[:-1], axis=1)
    for ratio, first, second in ((0.25, 10, 0), (0.5, 20, 0), (0.75, 20, 10), (1.0, 20, 20)):
        got = np.concatenate(
            on_ranks(split, lambda part, total, ratio=ratio: largest(StepTokens(*part, total), select_ratio=ratio))
        )
        want = [*np.argsort(draw[:20])[20 - first :], *(20 + np.argsort(draw[20:])[20 - second :])]
        assert np.flatnonzero(got).tolist() == sorted(want)
    got = on_ranks(
        split, lambda part, total: in_band(StepTokens(*part, total), select_ratio=0.25, cov_low=0.5, cov_high=2.0)
    )
    assert np.flatnonzero(np.concatenate(got)).tolist() == sorted(np.argsort(draw[:20])[10:])


def test_options_of_the_loss_reach_its_selection() -> None:
    tokens = StepTokens(*some_tokens(2, 100), alone)
    selects = bind("kl_cov", {"select_ratio": 0.2}).selects
    assert selects is not None and selects(tokens).sum() == 20
    default = bind("kl_cov", {}).selects
    assert default is not None and default(tokens).sum() == 1
    nothing = bind("clip_cov", {"cov_low": 50.0, "cov_high": 60.0}).selects
    assert nothing is not None and not nothing(tokens).any()
    assert bind("ppo", {}).selects is None
    with pytest.raises(UserError, match="'select_ratio'"):
        bind("clip_cov", {"select_ratio": 0.0})


def test_no_token_at_all_is_no_error() -> None:
    empty = StepTokens(*np.zeros((3, 0)), alone)
    assert len(largest(empty, select_ratio=0.5)) == 0
    assert len(in_band(empty, select_ratio=0.5, cov_low=0.0, cov_high=1.0)) == 0
