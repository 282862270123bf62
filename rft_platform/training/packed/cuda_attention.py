"""Attention kernels on CUDA: flex_attention over a prefix tree, and flash attention over rows that share nothing.

Tree attention (``tree_mask``, ``tree_attention``) reads shared keys in place and never copies them. The mask is exact
inside a tile of 128 x 128 and skips whole tiles: a tile is computed only if at least one of its queries has one of its
keys as an ancestor. The tiles are found on the CPU, in time linear in the length of the trie's paths. One layer,
forward and backward, with 16 query heads and 8 key heads of 128, takes on an H200 in bfloat16: 5.0 ms for ten groups of
8 x 256 tokens below prompts of 1,024 (variable-length attention over gathered keys: 8.0 ms), 3.6 ms for eight runs of
eight turns (7.5 ms). Gradients of tree attention are deterministic; those of variable-length attention are not
(benchmarks/results/tree_attention_cuda.json). The kernel is compiled once for each static length of packs. A failed
compilation is an error, because torch would fall back to the unfused flex_attention, which builds the whole score
matrix.

Row attention (``row_ranges``, ``row_attention``) is variable-length flash attention: the rows of a pack are
concatenated, and the kernel gets the offset of each row. Padding at the end of a pack is split into rows that are not
longer than the longest real row, to limit its cost. The results of padding are not read.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rft_platform.training.packed.packing import TILE, Pack, ragged
from rft_platform.training.packed.transfer import to_device

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_LEAST_DIM = 16  # the smallest head size of flex_attention's kernel
_LARGEST_HEAD, _HEAD_STEP = 256, 8  # head sizes of flash attention: multiples of 8, up to 256


def tree_mask(pack: Pack, device: torch.device) -> "BlockMask":
    """Build the block mask: node i sees node j iff ``j <= i < subtree_end[j]``; a padding token sees itself."""
    from torch.nn.attention.flex_attention import BlockMask

    touched, full = _tiles(pack)
    ends = np.append(pack.subtree_end, np.arange(len(pack.input_ids), pack.length) + 1)
    subtree_end = to_device(ends.astype(np.int32), device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < subtree_end[key])

    return BlockMask.from_kv_blocks(
        *_ordered(touched & ~full, device),
        *_ordered(full, device),
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(pack.length, pack.length),
    )


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: "BlockMask", scale: float) -> Tensor:
    """Attention of query [1, H, T, D] over key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    grouped, width = query.shape[1] != key.shape[1], query.shape[-1]
    if width < _LEAST_DIM:  # pad with zeros, which do not change the product
        query, key, value = (pad(x, (0, _LEAST_DIM - width)) for x in (query, key, value))
    out: Tensor = _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out[..., :width].transpose(1, 2)


def _tiles(pack: Pack) -> tuple[np.ndarray, np.ndarray]:
    """Two masks, bool [query tile, key tile]: whether any query of the tile sees any key; whether all see all keys."""
    nodes = len(pack.input_ids)
    count = -(-pack.length // TILE)
    touched = np.zeros((count, count), bool)
    row, offset = ragged(np.diff(pack.path_start))
    ancestor = pack.path[pack.path_start[row] + offset] // TILE
    new = np.append(True, (ancestor[1:] != ancestor[:-1]) | (row[1:] != row[:-1]))
    row, ancestor = row[new], ancestor[new]
    first, last = pack.row_start[:-1] // TILE, (pack.row_start[1:] - 1) // TILE  # tiles of the nodes that a row adds
    pair, step = ragged(np.maximum(last - first + 1, 0)[row])
    touched[first[row][pair] + step, ancestor[pair]] = True
    touched &= np.tri(count, dtype=bool)
    start = np.arange(count) * TILE
    touched[start + TILE > nodes, start + TILE > nodes] = True  # on the diagonal: padding sees itself
    covers = np.zeros(count, np.int64)  # up to this node every node of the key tile is an ancestor
    real = start < nodes
    covers[real] = np.minimum.reduceat(pack.subtree_end, start[real])
    full = touched & (start[:, None] >= start + TILE) & (np.minimum(start + TILE, nodes)[:, None] <= covers)
    return touched, full


def _ordered(tiles: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each query tile: the number of its key tiles [1, 1, Q]; all tile indices [1, 1, Q, K], key tiles first."""
    indices = np.argsort(~tiles, axis=1, kind="stable").astype(np.int32)
    counts = tiles.sum(1, dtype=np.int32)
    return to_device(counts, device)[None, None], to_device(indices, device)[None, None]


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """The fused kernel; torch.compile compiles it for each new length."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


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
    return RowRanges(to_device(offsets, device), longest)


def row_attention(query: Tensor, key: Tensor, value: Tensor, rows: RowRanges, scale: float) -> Tensor:
    """Attention of query [1, H, T, D] over key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    width = query.shape[-1]
    if width > _LARGEST_HEAD:
        raise RuntimeError(f"flash attention supports head sizes up to {_LARGEST_HEAD}, the model has {width}")
    if missing := -width % _HEAD_STEP:  # pad with zeros, which do not change the product
        query, key, value = (pad(x, (0, missing)) for x in (query, key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True  # torch 2.11 accepts grouped heads without this option
    out: Tensor = varlen_attn(q, k, v, rows.offsets, rows.offsets, rows.longest, rows.longest, **options)
    return out[None, ..., :width]
