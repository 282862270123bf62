"""Sample tokens and compute their log-probs from logits, for rows with different settings."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class SamplingRows:
    """Settings per row, each [rows]. Temperature 0 is greedy; ``top_k`` <= 0 and ``top_p`` >= 1 do not truncate."""

    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int64


def sampling_logprobs(logits: torch.Tensor, settings: SamplingRows) -> torch.Tensor:
    """Log-probs [rows, vocabulary] of the sampling distribution, in float32.

    Temperature is applied first, then top-k, then top-p on the tokens that top-k left, each renormalised. Excluded
    tokens get -inf. Greedy rows give the log-probs of temperature 1.
    """
    temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0)
    scaled = logits.float() / temperature[:, None]
    restricted = ((settings.top_k > 0) | (settings.top_p < 1)) & (settings.temperature > 0)
    if bool(restricted.any()):
        scaled = torch.where(restricted[:, None], _restrict(scaled, settings), scaled)
    return scaled.log_softmax(-1)


def sample(logprobs: torch.Tensor, greedy: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row [rows] of ``logprobs`` [rows, vocabulary]; the likeliest where ``greedy`` [rows].

    Inverse of the cumulative distribution at ``uniform`` [rows] in [0, 1): the first token whose cumulative
    probability exceeds it. A token of probability 0 is never drawn, because it does not raise the cumulative
    probability.
    """
    if bool(greedy.all()):
        return logprobs.argmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding may raise u * total to total itself, which no cumulative probability exceeds.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    drawn = drawn.clamp(max=logprobs.shape[-1] - 1)  # for NaN, which the caller detects in the log-prob
    return torch.where(greedy, logprobs.argmax(-1), drawn) if bool(greedy.any()) else drawn


def _restrict(scaled: torch.Tensor, settings: SamplingRows) -> torch.Tensor:
    """``scaled`` [rows, vocabulary] with -inf outside each row's top-k and top-p; ties keep the lower token id."""
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    top_k = torch.where(settings.top_k > 0, settings.top_k, scaled.shape[-1])
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability
    # The likeliest token is always kept; the token that crosses top_p is the last one kept.
    outside = (before >= settings.top_p[:, None]) & (rank > 0) & (settings.top_p < 1)[:, None]
    ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, index, ordered)
