"""Attention over rows without shared prefixes on CUDA: variable-length flash attention, each row separate.

The rows of a pack are concatenated, and the kernel gets the offset of each. Padding at the end of a pack is split into
rows no longer than the longest real one, so that it costs no more than they do. The results of padding are not read.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rft_platform.training.packing import Pack

_LARGEST_HEAD, _HEAD_STEP = 256, 8  # the kernel's head sizes: multiples of 8, up to 256


@dataclass(slots=True)
class RowRanges:
    """Where the rows of a pack start."""

    offsets: Tensor  # int32 [R + 1], the last is the pack's length
    longest: int  # tokens


def row_ranges(pack: Pack, device: torch.device) -> RowRanges:
    """Return the ranges of ``pack``, whose rows share no prefix, and of its padding."""
    longest = int(np.diff(pack.row_start).max())
    padding = np.arange(pack.row_start[-1], pack.length, longest)[1:]
    ends = [pack.length] if pack.length > pack.row_start[-1] else []
    offsets = np.concatenate([pack.row_start, padding, ends]).astype(np.int32)
    return RowRanges(torch.from_numpy(offsets).to(device, non_blocking=True), longest)


def row_attention(query: Tensor, key: Tensor, value: Tensor, rows: RowRanges, scale: float) -> Tensor:
    """Attention of query [1, H, T, D] over key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    width = query.shape[-1]
    if width > _LARGEST_HEAD:
        raise RuntimeError(f"flash attention computes heads of at most {_LARGEST_HEAD}, the model's have {width}")
    if missing := -width % _HEAD_STEP:  # pad with zeros, which do not change the product
        query, key, value = (pad(x, (0, missing)) for x in (query, key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True  # torch 2.11 accepts grouped heads without this option
    out: Tensor = varlen_attn(q, k, v, rows.offsets, rows.offsets, rows.longest, rows.longest, **options)
    return out[None, ..., :width]
