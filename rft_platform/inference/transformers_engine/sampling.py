"""Sample tokens from logits, for rows with different settings, by counter-based random numbers.

A row is one sequence to sample. Every random number is ``hash(seed, prompt index, choice index, position)`` with the
SplitMix64 finaliser as hash (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). There
is no generator state, so order, batch composition and thread timing cannot change a result.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
UNIFORM_BITS = 53


@dataclass(slots=True)
class SamplingRows:
    """Settings per row, each [rows]. Temperature 0 is greedy; ``top_k`` <= 0 and ``top_p`` >= 1 do not truncate."""

    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int64


def sampling_logprobs(logits: torch.Tensor, settings: SamplingRows) -> torch.Tensor:
    """Log-probs [rows, vocabulary] of the sampling distribution, in float32.

    Temperature is applied first, then top-k, then top-p on the tokens that top-k keeps; each step renormalises.
    Excluded tokens get -inf. Greedy rows give the log-probs of temperature 1.
    """
    temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0)
    scaled = logits.float() / temperature[:, None]
    restricted = ((settings.top_k > 0) | (settings.top_p < 1)) & (settings.temperature > 0)
    if bool(restricted.any()):
        scaled = torch.where(restricted[:, None], _restrict(scaled, settings), scaled)
    return scaled.log_softmax(-1)


def sample(logprobs: torch.Tensor, greedy: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row [rows] from ``logprobs`` [rows, vocabulary]; where ``greedy`` [rows], the likeliest token.

    The sampled token is the first one whose cumulative probability exceeds ``uniform`` [rows] in [0, 1). A token of
    probability 0 is never drawn, because it does not increase the cumulative probability.
    """
    if bool(greedy.all()):
        return logprobs.argmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding may turn u * total into total, which no cumulative probability exceeds.
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


def _signed(value: int) -> int:
    """The two's complement int64 with the low 64 bits of ``value``."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64; torch's own shift repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser. The int64 values stand for 64 unsigned bits: products wrap as the algorithm requires."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def fold(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Derive one key per number in ``data`` (0, 1, ...) from ``key``; both are int64 and broadcast together."""
    return mix64(key ^ mix64((data + 1) * _signed(_GOLDEN)))


def row_keys(seed: int | None, prompts: Sequence[int], choices: Sequence[int]) -> torch.Tensor:
    """Key [rows] of each choice of each prompt under ``seed``; None draws a fresh seed from the system."""
    root = torch.tensor(_signed(secrets.randbits(64) if seed is None else seed), dtype=torch.int64)
    by_prompt = fold(mix64(root), torch.tensor(prompts, dtype=torch.int64))
    return fold(by_prompt, torch.tensor(choices, dtype=torch.int64))


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) per row: draw number ``positions`` [rows] of the stream ``keys`` [rows]."""
    bits = _shift_right(fold(keys, positions), 64 - UNIFORM_BITS)
    return bits.to(torch.float64) * 2.0**-UNIFORM_BITS
