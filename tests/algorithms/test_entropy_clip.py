"""Clip-B and Clip-V: which tokens are selected, against the definitions written out, for tokens spread over ranks."""

import numpy as np
import pytest
from test_covariance import alone, on_ranks

from rft_platform.algorithms.losses.entropy import below_the_batch, below_the_vocabulary
from rft_platform.algorithms.losses.registry import StepTokens, bind
from rft_platform.common.errors import UserError

COUNT = 400


def some_tokens(seed: int) -> np.ndarray:
    """logp, advantage, draw and entropy change of ``COUNT`` tokens; columns of ``StepTokens`` without ``total``."""
    rng = np.random.default_rng(seed)
    advantage = rng.choice([-1.5, -0.5, 0.0, 0.7], COUNT)
    return np.stack([-rng.exponential(2.0, COUNT), advantage, rng.random(COUNT), rng.standard_t(3, COUNT) * 0.1])


def batch_rule(tokens: np.ndarray, mu: float) -> list[int]:
    """Clip-B as the paper has it, for negative samples: z-scores of S in the batch."""
    change = tokens[3].tolist()
    mean = sum(change) / COUNT
    std = (sum((s - mean) ** 2 for s in change) / COUNT) ** 0.5
    return [i for i, s in enumerate(change) if tokens[1][i] < 0 and s < mean - mu * std]


def vocabulary_rule(tokens: np.ndarray, mu: float, most: int) -> list[int]:
    """Clip-V: the difference to the expectation over the vocabulary in units of its standard deviation."""
    change = tokens[3].tolist()
    mean = sum(change) / COUNT
    std = (sum((s - mean) ** 2 for s in change) / COUNT) ** 0.5
    far = [i for i, s in enumerate(change) if tokens[1][i] < 0 and -s > mu * std]
    return sorted(sorted(far, key=lambda i: change[i])[:most])


@pytest.mark.parametrize("parts", [[COUNT], [100, 0, 300]])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_selected_over_all_ranks(parts: list[int], seed: int) -> None:
    tokens = some_tokens(seed)
    split = np.split(tokens, np.cumsum(parts)[:-1], axis=1)

    def of(part: np.ndarray, total: object) -> StepTokens:
        return StepTokens(part[0], part[1], part[2], total, part[3])  # type: ignore[arg-type]

    got = on_ranks(split, lambda part, total: below_the_batch(of(part, total), mu=1.2))
    want = batch_rule(tokens, 1.2)
    assert np.flatnonzero(np.concatenate(got)).tolist() == want != []
    for share, most in ((1.0, COUNT), (0.02, 8), (1e-4, 1)):
        got = on_ranks(
            split, lambda part, total, share=share: below_the_vocabulary(of(part, total), mu=1.0, max_share=share)
        )
        want = vocabulary_rule(tokens, 1.0, most)
        assert np.flatnonzero(np.concatenate(got)).tolist() == want
        assert 0 < len(want) <= most


def test_of_equally_far_tokens_draws_choose() -> None:
    draw = np.array([0.1, 0.9, 0.5, 0.2])
    change = np.array([-5.0, -5.0, -5.0, 0.0])
    tokens = StepTokens(np.zeros(4), -np.ones(4), draw, alone, change)
    assert below_the_vocabulary(tokens, mu=0.1, max_share=0.5).tolist() == [False, True, True, False]


@pytest.mark.parametrize("change", [np.zeros(0), np.full(5, 0.3), np.zeros(5)])
def test_equal_tokens_and_no_tokens_select_nothing(change: np.ndarray) -> None:
    zeros = np.zeros(len(change))
    tokens = StepTokens(zeros, zeros - 1, zeros, alone, change)
    assert not below_the_batch(tokens, mu=0.0).any()
    assert not below_the_vocabulary(tokens, mu=0.0, max_share=1.0).any()


def test_options_of_the_losses_reach_their_selection() -> None:
    columns = some_tokens(5)
    tokens = StepTokens(columns[0], columns[1], columns[2], alone, columns[3])
    for name, narrow in (("clip_b", {"mu": 1.0}), ("clip_v", {"mu": 1.0, "max_share": 0.5})):
        few, many = bind(name, {"mu": 50.0}).selects, bind(name, narrow).selects
        assert few is not None and not few(tokens).any()
        assert many is not None and many(tokens).any()
    with pytest.raises(UserError, match="'max_share'"):
        bind("clip_v", {"max_share": 0.0})
