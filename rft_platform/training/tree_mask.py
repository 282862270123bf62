"""Attention over a trie on CUDA: flex_attention under a block mask, shared keys read in place and never copied.

The mask is exact within a tile of 128 x 128 and skips whole tiles: a tile is computed only where one of its queries has
one of its keys as an ancestor. Tiles are found on the CPU from the trie in time linear in its paths. One layer, forward
and backward, of 16 query and 8 key heads of 128 on an H200, bfloat16: 5.0 ms for ten groups of 8 x 256 tokens below
prompts of 1,024 (variable-length attention over gathered keys: 8.0 ms), 3.6 ms for eight runs of eight turns (7.5 ms).
Unlike that one its gradients are the same every time (benchmarks/results/tree_attention_cuda.json).

The kernel is compiled once a static length of packs. Where it cannot be compiled that is an error: the unfused form of
flex_attention, which torch would fall back to, builds the whole matrix of scores.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rft_platform.training.packing import TILE, Pack, ragged

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_LEAST_DIM = 16  # the kernel multiplies nothing narrower


def tree_mask(pack: Pack, device: torch.device) -> "BlockMask":
    """Block mask in which node i sees node j iff ``j <= i < subtree_end[j]``; a token of padding sees itself."""
    from torch.nn.attention.flex_attention import BlockMask

    touched, full = _tiles(pack)
    ends = np.append(pack.subtree_end, np.arange(len(pack.input_ids), pack.length) + 1)
    subtree_end = torch.from_numpy(ends).to(device, torch.int32)

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
    """Query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    grouped, width = query.shape[1] != key.shape[1], query.shape[-1]
    if width < _LEAST_DIM:  # zeros add nothing to a product
        query, key, value = (pad(x, (0, _LEAST_DIM - width)) for x in (query, key, value))
    out: Tensor = _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out[..., :width].transpose(1, 2)


def _tiles(pack: Pack) -> tuple[np.ndarray, np.ndarray]:
    """bool [tiles, tiles] each: which tiles (query, key) have any pair that sees, and in which all do."""
    nodes = len(pack.input_ids)
    count = -(-pack.length // TILE)
    touched = np.zeros((count, count), bool)
    row, offset = ragged(np.diff(pack.path_start))
    ancestor = pack.path[pack.path_start[row] + offset] // TILE
    new = np.append(True, (ancestor[1:] != ancestor[:-1]) | (row[1:] != row[:-1]))
    row, ancestor = row[new], ancestor[new]
    first, last = pack.row_start[:-1] // TILE, (pack.row_start[1:] - 1) // TILE  # tiles of a row's own nodes
    pair, step = ragged(np.maximum(last - first + 1, 0)[row])
    touched[first[row][pair] + step, ancestor[pair]] = True
    touched &= np.tri(count, dtype=bool)
    start = np.arange(count) * TILE
    touched[start + TILE > nodes, start + TILE > nodes] = True  # on the diagonal: padding sees itself
    covers = np.zeros(count, np.int64)  # every node of the key tile is an ancestor up to here
    real = start < nodes
    covers[real] = np.minimum.reduceat(pack.subtree_end, start[real])
    full = touched & (start[:, None] >= start + TILE) & (np.minimum(start + TILE, nodes)[:, None] <= covers)
    return touched, full


def _ordered(tiles: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each query tile the number of its key tiles [1, 1, Q] and their indices, those first [1, 1, Q, K]."""
    indices = np.argsort(~tiles, axis=1, kind="stable").astype(np.int32)
    counts = tiles.sum(1, dtype=np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """The fused kernel, compiled for each length that it meets."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
