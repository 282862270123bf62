"""Attention over packs: every node sees only itself and its ancestors in the trie.

The function is registered with transformers as ``packed_tree``. A contiguous range of nodes attends only to itself and
to the ancestors of its first node. A pack is therefore cut into such ranges ("blocks") if this saves work: small tries
stay whole, long completions of one prompt are separated. Blocks of similar size are padded to one size and run as SDPA
with a mask. On CUDA the whole pack runs at once: with a block mask (``tree_mask``) or, if its rows share nothing, as
variable-length attention (``row_attention``).

Attention is excluded from ``torch.compile`` and is a graph break inside a layer: its kernels are already fused, and the
row lengths, which differ from pack to pack, would otherwise be compiled into the graph.

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
concatenated, and the kernel gets the offset of each row. Padding at the end of a pack is split into rows of a tile, or
as long as the longest real row, to limit its cost. The results of padding are not read.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from rft_platform.training.packed.packing import TILE, Pack, ragged

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` without waiting for the work that the device has queued.

    CUDA copies asynchronously only from pinned memory. A copy from pageable memory waits until the stream is empty, so
    that the device idles while the host prepares the next pack.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


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
    """Return the ranges of ``pack``, whose rows share no prefix, and of its padding.

    The kernel computes whole tiles: rows of padding shorter than a tile would cost as much as a tile each.
    """
    longest = max(int(np.diff(pack.row_start).max()), TILE)
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


ATTENTION = "packed_tree"
GATHER_COST = 16  # copying one key costs about this many query-key products
BUCKET_COST = 4096  # launching one more padded group costs about this many


@dataclass(slots=True)
class PaddedBlocks:
    """B blocks of at most Q queries and K keys each."""

    query: Tensor  # int64 [B * Q], nodes; padding repeats the first node of the block
    key: Tensor  # int64 [B * K], nodes
    mask: Tensor | None  # float [B, 1, Q, K]: 0 where the query sees the key, else -inf; None: causal, Q == K
    count: int  # B


@dataclass(slots=True)
class AttentionPlan:
    """The data about a pack that the attention function needs: built once per pack, used by every layer."""

    tokens: int  # nodes plus padding
    longest: int  # deepest row, in tokens
    blocks: list[PaddedBlocks]
    slot: Tensor | None  # int64 [tokens]: index of each node's output in the concatenated block outputs
    mask: "BlockMask | None" = None  # instead of blocks, on CUDA
    rows: RowRanges | None = None  # instead of blocks, on CUDA, if the rows share nothing


def plan_attention(pack: Pack, device: torch.device, dtype: torch.dtype) -> AttentionPlan:
    """Build the plan for ``pack`` on ``device`` with activations of ``dtype``."""
    plan = AttentionPlan(pack.length, int(np.diff(pack.path_start).max()), [], None)
    if has_tiles(device, dtype):
        if pack.shared.any():
            plan.mask = tree_mask(pack, device)
        else:
            plan.rows = row_ranges(pack, device)
        return plan
    first, last = _cut(pack)
    start, size = pack.row_start[first], pack.row_start[last] - pack.row_start[first]
    outside = pack.shared[first]  # ancestors of the block's first node
    slot, offset = np.zeros(plan.tokens, np.int64), 0  # padding gets the output of any node; nobody reads it
    for members in _buckets(size, size + outside):
        width = int(size[members].max())
        plan.blocks.append(_pad(pack, first[members], start[members], size[members], outside[members], device, dtype))
        block, column = ragged(size[members])
        slot[start[members][block] + column] = offset + block * width + column
        offset += len(members) * width
    plan.slot = to_device(slot, device)
    return plan


def has_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether CUDA kernels compute attention on ``device``: tree attention works on tiles then."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _cut(pack: Pack) -> tuple[np.ndarray, np.ndarray]:
    """Blocks as ranges of rows [first, last). A row joins the previous block if this is cheaper."""
    first: list[int] = []
    queries = keys = 0
    for row, (own, shared) in enumerate(zip(np.diff(pack.row_start).tolist(), pack.shared.tolist(), strict=True)):
        joined = (queries + own) * (keys + own)
        apart = queries * keys + (own + GATHER_COST) * (own + shared)
        if own and (not first or joined > apart):
            first.append(row)
            queries, keys = own, own + shared
        else:
            queries, keys = queries + own, keys + own
    starts = np.array(first, np.int64)
    return starts, np.append(starts[1:], len(pack.rows))


def _buckets(queries: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Group blocks of similar size. A new group starts if padding to its largest would cost more than a launch."""
    groups: list[list[int]] = []
    waste = height = width = 0
    for block in np.lexsort((queries, keys))[::-1].tolist():
        q, k = int(queries[block]), int(keys[block])
        grown = max(height, q)
        waste += grown * width - q * k + (grown - height) * width * (len(groups[-1]) if groups else 0)
        if not groups or waste > BUCKET_COST:
            groups.append([block])
            height, width, waste = q, k, 0
        else:
            groups[-1].append(block)
            height = grown
    return [np.array(group, np.int64) for group in groups]


def _pad(
    pack: Pack, row: np.ndarray, start: np.ndarray, size: np.ndarray, outside: np.ndarray,
    device: torch.device, dtype: torch.dtype,
) -> PaddedBlocks:  # fmt: skip
    """Pad blocks to one size. Block i starts with row ``row[i]`` at node ``start[i]``, has ``size[i]`` nodes, and
    ``outside[i]`` ancestors before them."""
    start, size, outside = start[:, None], size[:, None], outside[:, None]
    column = np.arange(int(size.max()))
    query = np.where(column < size, start + column, start)
    column = np.arange(int((size + outside).max()))
    ancestor = pack.path[np.minimum(pack.path_start[row][:, None] + column, len(pack.path) - 1)]
    key = np.where(column < outside, ancestor, np.where(column < outside + size, start + column - outside, start))
    nodes = (to_device(query.ravel(), device), to_device(key.ravel(), device))
    ends = np.where(column[: query.shape[1]] < size, pack.subtree_end[query], start + size)
    if not outside.any() and (ends >= start + size).all():  # no shared prefix: causal attention saves half the work
        return PaddedBlocks(*nodes, None, len(row))
    queries, keys = query[:, :, None], key[:, None, :]
    sees = (keys <= queries) & (queries < pack.subtree_end[keys]) & (column < outside + size)[:, None, :]
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(torch.from_numpy(~sees), -torch.inf)
    return PaddedBlocks(*nodes, mask[:, None].to(device), len(row))


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D].

    Raises RuntimeError for everything with which the result would differ from that of separate rows: no plan, a
    transformers mask, a sliding window shorter than the longest row, soft-capping, attention sinks, a position bias.
    """
    if attention_plan is None:
        raise RuntimeError(
            "packed attention was called without a plan: run the model through PackedPolicy, which builds one per pack"
        )
    if query.shape[0] != 1 or query.shape[2] != attention_plan.tokens:
        raise RuntimeError(
            f"packed attention over {tuple(query.shape)}: the plan is for [1, H, {attention_plan.tokens}, D]"
        )
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if sliding_window is not None and sliding_window < attention_plan.longest:
        unsupported.append(f"sliding_window {sliding_window} on rows of up to {attention_plan.longest} tokens")
    if attention_mask is not None or unsupported:
        raise RuntimeError(f"packed attention does not support {', '.join(unsupported) or 'an attention mask'}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if dropout and not attention_plan.blocks:
        raise RuntimeError(f"packed attention on CUDA has no dropout: set attention_dropout to 0, got {dropout}")
    if attention_plan.rows is not None:
        return row_attention(query, key, value, attention_plan.rows, scale), None
    if attention_plan.mask is not None:
        return tree_attention(query, key, value, attention_plan.mask, scale), None
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, heads, D]
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        # On the CPU a bfloat16 backward takes four times as long as float32 (torch 2.13, rows of 16 tokens).
        q, k, v = q.float(), k.float(), v.float()
    outputs = [_padded(q, k, v, blocks, scale, dropout) for blocks in attention_plan.blocks]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, attention_plan.slot)[None].to(query.dtype), None


def _padded(q: Tensor, k: Tensor, v: Tensor, blocks: PaddedBlocks, scale: float, dropout: float) -> Tensor:
    """Attention of all blocks of one group; [B * Q, H, D]."""
    heads = q.shape[1]
    q_b, k_b, v_b = (
        x.index_select(0, index).unflatten(0, (blocks.count, -1)).transpose(1, 2)
        for x, index in ((q, blocks.query), (k, blocks.key), (v, blocks.key))
    )  # [B, heads, Q or K, D]
    mask = None if blocks.mask is None else blocks.mask.to(q.dtype)
    out = scaled_dot_product_attention(
        q_b, k_b, v_b, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale,
        enable_gqa=k.shape[1] != heads,
    )  # fmt: skip
    return out.transpose(1, 2).flatten(0, 1)


def register_attention() -> None:
    """Register ``attn_implementation="packed_tree"`` with transformers, which then builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
