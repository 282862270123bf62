"""The sampling distribution and draws from it."""

import math

import pytest
import torch

from rft_platform.inference.transformers_engine.sampling import (
    SamplingRows,
    row_keys,
    sample,
    sampling_logprobs,
    uniforms,
)


def rows(temperature: list[float], top_p: list[float] | None = None, top_k: list[int] | None = None) -> SamplingRows:
    count = len(temperature)
    return SamplingRows(
        torch.tensor(temperature), torch.tensor(top_p or [1.0] * count), torch.tensor(top_k or [-1] * count)
    )


LOGITS = torch.tensor([[2.0, 1.0, 0.0, 1.0, -3.0]])


def test_temperature_divides_the_logits() -> None:
    logprobs = sampling_logprobs(LOGITS.repeat(2, 1), rows([1.0, 0.5]))
    assert torch.allclose(logprobs[0], LOGITS[0].log_softmax(-1))
    assert torch.allclose(logprobs[1], (LOGITS[0] * 2).log_softmax(-1))


def test_greedy_rows_give_temperature_one_and_ignore_restrictions() -> None:
    logprobs = sampling_logprobs(LOGITS, rows([0.0], [0.1], [1]))
    assert torch.allclose(logprobs[0], LOGITS[0].log_softmax(-1))
    assert sample(logprobs, torch.tensor([True]), torch.tensor([0.99], dtype=torch.float64)).item() == 0


def test_top_k_keeps_exactly_k_and_ties_fall_to_the_lower_id() -> None:
    logprobs = sampling_logprobs(LOGITS, rows([1.0], None, [2]))[0]
    assert torch.isfinite(logprobs).tolist() == [True, True, False, False, False]
    assert logprobs[0].item() == pytest.approx(math.log(math.e / (1 + math.e)), abs=1e-6)


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.01, 1), (0.49, 1), (0.6, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)):
        logprobs = sampling_logprobs(logits, rows([1.0], [top_p]))[0]
        assert int(torch.isfinite(logprobs).sum()) == kept
        assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    logprobs = sampling_logprobs(logits, rows([1.0], [0.6], [2]))[0]  # renormalised: 2/3 and 1/3
    assert torch.isfinite(logprobs).tolist() == [True, False, False, False]


def test_restrictions_are_per_row() -> None:
    logprobs = sampling_logprobs(LOGITS.repeat(3, 1), rows([1.0] * 3, [1.0, 1.0, 0.3], [-1, 1, -1]))
    assert torch.isfinite(logprobs).sum(-1).tolist() == [5, 1, 1]


def test_frequencies_match_the_distribution() -> None:
    draws = 40_000
    keys = row_keys(1, [0] * draws, list(range(draws)))
    logprobs = sampling_logprobs(LOGITS.repeat(draws, 1), rows([0.7] * draws, [0.99] * draws))
    tokens = sample(
        logprobs, torch.zeros(draws, dtype=torch.bool), uniforms(keys, torch.zeros(draws, dtype=torch.int64))
    )
    probability = logprobs[0].exp()
    counts = torch.bincount(tokens, minlength=5)
    for token, p in enumerate(probability.tolist()):
        assert abs(counts[token].item() - draws * p) <= 5 * (draws * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_ruled_out_token_is_never_drawn(uniform: float) -> None:
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 400:600] = 0.1
    logprobs = sampling_logprobs(logits, rows([1.0]))
    token = sample(logprobs, torch.tensor([False]), torch.tensor([uniform], dtype=torch.float64)).item()
    assert 400 <= token < 600
    assert token == {0.0: 400, 0.5: 500}.get(uniform, 599)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logprobs = sampling_logprobs(LOGITS.repeat(2, 1), rows([0.0, 1.0]))
    tokens = sample(logprobs, torch.tensor([True, False]), torch.tensor([0.9999, 0.9999], dtype=torch.float64))
    assert tokens.tolist() == [0, 4]
