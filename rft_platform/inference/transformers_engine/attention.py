"""Attention that replaces the model's own: prompts without padding masks, then one token per row on a slot cache.

A row is one sequence to sample.

The model calls the registered function in every layer and passes on the keyword ``attention_pass`` of the forward
call, which holds the keys and values. transformers' cache and mask construction are therefore not used, and
grouped-query heads are never repeated in memory.
"""

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F

ATTENTION_NAME = "rft_slots"
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")  # attention options of some architectures
GROWTH = 32  # slot lengths are rounded up to a multiple of this many tokens, so that growing is rare
SPARE = 4  # a cache is shrunk if it is more than this many times larger than its rows need


class AttentionPass(Protocol):
    """Attention of one forward call; ``attend`` is called once per layer."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attention output [rows, query heads, tokens, head size] of layer ``layer``."""
        ...


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_pass: AttentionPass | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: [rows, heads, tokens, head size] -> [rows, tokens, heads, head size]."""
    if attention_pass is None:
        raise ValueError(f"attention '{ATTENTION_NAME}' needs the keyword attention_pass of the forward call")
    if refused := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise ValueError(f"attention '{ATTENTION_NAME}' does not support {', '.join(refused)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    output = attention_pass.attend(layer, query, key, value, scale, sliding_window)
    return output.transpose(1, 2).contiguous(), None


class PromptPass:
    """Attention over whole sequences, padded on the right: causal attention hides the padding without a mask."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.keys: list[torch.Tensor] = []  # per layer: [rows, heads, tokens, head size]
        self.values: list[torch.Tensor] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention within each row; with ``keep``, keys and values are kept for the cache."""
        if self.keep:
            self.keys.append(k)
            self.values.append(v)
        grouped = q.shape[1] != k.shape[1]
        if window is None or q.shape[2] <= window:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        position = torch.arange(q.shape[2], device=q.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


class SlotCache:
    """Keys and values of the rows being decoded: row r's token t is at ``keys[layer][r, :, t]``.

    Rows are left-aligned, so rows of any length share a batch without shifting. Buffers start as zeros because masked
    positions enter the product with weight 0, and 0 * NaN would be NaN.
    """

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    @property
    def capacity(self) -> tuple[int, int]:
        """(rows, tokens per row) that fit without growing."""
        return (self.keys[0].shape[0], self.keys[0].shape[2]) if self.keys else (0, 0)

    def reserve(self, rows: int, tokens: int, in_use: int, like: PromptPass | None = None) -> None:
        """Make room for ``rows`` rows of ``tokens`` tokens, keeping the contents of the first ``in_use`` rows.

        Growing copies the contents, so a cache in use grows by at least half. ``like`` gives the shapes for an empty
        cache.
        """
        have_rows, have_tokens = self.capacity
        if rows <= have_rows and tokens <= have_tokens:
            return
        if in_use:
            rows = max(have_rows, rows if rows <= have_rows else rows + rows // 2)
            tokens = max(have_tokens, tokens if tokens <= have_tokens else tokens + tokens // 2)
        self._resize(rows, tokens, in_use, like)

    def shrink(self, rows: int, tokens: int, in_use: int) -> None:
        """Release memory if the cache is more than ``SPARE`` times as large as ``rows`` rows of ``tokens`` tokens.

        Keeps the contents of the first ``in_use`` rows. With 0 rows the cache becomes empty.
        """
        have_rows, have_tokens = self.capacity
        if not rows:
            self.keys, self.values = [], []
        elif have_rows * have_tokens > SPARE * rows * tokens:
            self._resize(min(rows, have_rows), min(tokens, have_tokens), in_use)

    def _resize(self, rows: int, tokens: int, in_use: int, like: PromptPass | None = None) -> None:
        """Allocate one block for all layers, because malloc returns only large freed blocks to the system."""
        tokens = -(-tokens // GROWTH) * GROWTH
        old, examples = [*self.keys, *self.values], [*like.keys, *like.values] if like else [*self.keys, *self.values]
        shapes = [(rows, example.shape[1], tokens, example.shape[3]) for example in examples]
        block = examples[0].new_zeros(sum(map(math.prod, shapes)))
        new = [part.view(shape) for part, shape in zip(block.split([*map(math.prod, shapes)]), shapes, strict=True)]
        if in_use:
            kept = min(tokens, self.capacity[1])
            for source, target in zip(old, new, strict=True):
                target[:in_use, :, :kept] = source[:in_use, :, :kept]
        layers = len(new) // 2
        self.keys, self.values = new[:layers], new[layers:]

    def store(self, prompts: PromptPass, source: torch.Tensor, first: int) -> None:
        """Copy row ``source[i]`` of ``prompts`` to slot ``first + i``."""
        stop, tokens = first + len(source), prompts.keys[0].shape[2]
        for buffers, parts in ((self.keys, prompts.keys), (self.values, prompts.values)):
            for buffer, part in zip(buffers, parts, strict=True):
                buffer[first:stop, :, :tokens] = part[source]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots ``source`` over slots ``target``."""
        for buffer in (*self.keys, *self.values):
            buffer[target] = buffer[source]


class TokenPass:
    """Attention of one new token per row over its cache row. ``lengths`` [rows]: tokens already in each row."""

    def __init__(self, cache: SlotCache, lengths: torch.Tensor, longest: int) -> None:
        self.cache = cache
        self.lengths = lengths
        self.rows = torch.arange(len(lengths), device=lengths.device)
        self.tokens = longest + 1
        self.position = torch.arange(self.tokens, device=lengths.device)
        visible = self.position <= lengths[:, None]
        self.mask = None if bool(visible.all()) else visible[:, None, None, :]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attention of the new token over its row. Query heads that share a key head are passed as query positions."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        rows, heads = k.shape[:2]
        if self.mask is None:  # all rows have the same length: one slice instead of an indexed write
            keys[:rows, :, self.tokens - 1] = k[:, :, 0]
            values[:rows, :, self.tokens - 1] = v[:, :, 0]
        else:
            keys[self.rows, :, self.lengths] = k[:, :, 0]
            values[self.rows, :, self.lengths] = v[:, :, 0]
        out = F.scaled_dot_product_attention(
            q.reshape(rows, heads, -1, q.shape[-1]),
            keys[:rows, :, : self.tokens],
            values[:rows, :, : self.tokens],
            attn_mask=self._mask(window),
            scale=scale,
        )
        return out.reshape(rows, q.shape[1], 1, -1)

    def _mask(self, window: int | None) -> torch.Tensor | None:
        if window is None or self.tokens <= window:
            return self.mask
        recent = (self.position > (self.lengths - window)[:, None])[:, None, None, :]
        return recent if self.mask is None else recent & self.mask
