"""Counter-based uniforms: a draw is a pure function of its key and never depends on the rest of the batch.

Every number is ``hash(seed, prompt index, choice index, position)`` with the SplitMix64 finaliser as hash (Steele,
Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). There is no generator state, so order,
batch composition and thread timing cannot change a result.
"""

import secrets
from collections.abc import Sequence

import torch

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
UNIFORM_BITS = 53


def _signed(value: int) -> int:
    """The two's complement int64 with the low 64 bits of ``value``."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's own repeats the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 read as 64 unsigned bits; int64 products wrap as the algorithm requires."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def fold(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """The keys of the children ``data`` (numbered from 0) of ``key``; both int64, broadcast together."""
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
