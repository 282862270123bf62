"""Log-probs and entropies of target tokens from a causal LM over packs; the head's gradient is made in the forward.

Hidden states are taken only where a token is predicted, and each distinct (state, target) is computed once. The LM
head runs in chunks: logits, log-softmax, the loss of the chunk's tokens and its gradient, then the logits are dropped.
So there is never a [tokens, vocabulary] tensor beyond a chunk, and no logits are computed twice (except for losses
that look at whole rows: those need all log-probs first).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rft_platform.errors import UserError
from rft_platform.training.attention import ATTENTION, AttentionPlan, plan_attention, register_attention
from rft_platform.training.packing import Pack

CHUNK_ELEMENTS = 1 << 27  # logits of a chunk: 512 MiB in float32, about three times that at the peak


@dataclass(slots=True)
class PackTensors:
    """The parts of a ``Pack`` that the model needs, on its device."""

    input_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]
    plan: AttentionPlan
    head_node: Tensor  # int64 [H]
    temperature: Tensor | None  # float32 [H, 1]; None: all 1
    pair_head: Tensor  # int64 [P]
    pair_target: Tensor  # int64 [P]
    token_pair: Tensor  # int64 [N]
    token_head: Tensor  # int64 [N]
    first_pair: np.ndarray  # int64 [H + 1], on the CPU: where each head's pairs begin
    first_token: np.ndarray  # int64 [P + 1], where each pair's tokens begin

    @classmethod
    def of(cls, pack: Pack, device: torch.device, dtype: torch.dtype) -> "PackTensors":
        """Move ``pack`` to ``device``; ``dtype`` is that of the activations."""

        def move(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        heads, pairs = len(pack.head_node), len(pack.pair_head)
        return cls(
            move(pack.input_ids)[None],
            move(pack.position_ids)[None],
            plan_attention(pack, device, dtype),
            move(pack.head_node),
            None if (pack.head_temperature == 1).all() else move(pack.head_temperature)[:, None],
            move(pack.pair_head),
            move(pack.pair_target),
            move(pack.token_pair),
            move(pack.pair_head[pack.token_pair]),
            np.searchsorted(pack.pair_head, np.arange(heads + 1)),
            np.searchsorted(pack.token_pair, np.arange(pairs + 1)),
        )


ChunkLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""``(logp [n], entropy [n], which tokens of the pack) -> loss, summed``. Called once for each chunk."""


@dataclass(slots=True)
class _Chunk:
    """A range of heads with its pairs and tokens; indices within the chunk."""

    heads: slice
    pairs: slice
    tokens: slice
    pair_head: Tensor
    pair_target: Tensor
    token_pair: Tensor
    token_head: Tensor


def _chunks(batch: PackTensors, size: int) -> Iterator[_Chunk]:
    count = len(batch.head_node)
    for start in range(0, count, size):
        stop = min(start + size, count)
        pairs = slice(int(batch.first_pair[start]), int(batch.first_pair[stop]))
        tokens = slice(int(batch.first_token[pairs.start]), int(batch.first_token[pairs.stop]))
        yield _Chunk(
            slice(start, stop),
            pairs,
            tokens,
            batch.pair_head[pairs] - start,
            batch.pair_target[pairs],
            batch.token_pair[tokens] - pairs.start,
            batch.token_head[tokens] - start,
        )


@dataclass(slots=True)
class _Head:
    """The LM head and the states it is applied to."""

    hidden: Tensor  # [H, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None
    batch: PackTensors

    def chunks(self) -> Iterator[_Chunk]:
        return _chunks(self.batch, max(1, CHUNK_ELEMENTS // len(self.weight)))

    def log_softmax(self, chunk: _Chunk) -> Tensor:
        """float32 [C, V]."""
        logits = nn.functional.linear(self.hidden[chunk.heads], self.weight, self.bias).float()
        if self.batch.temperature is not None:
            logits = logits.div_(self.batch.temperature[chunk.heads])
        return torch.log_softmax(logits, -1)

    @torch.no_grad()
    def score(self) -> tuple[Tensor, Tensor]:
        """Log-probs of all pairs and entropies of all heads."""
        logp, entropy = [], []
        for chunk in self.chunks():
            log_softmax = self.log_softmax(chunk)
            logp.append(log_softmax[chunk.pair_head, chunk.pair_target])
            entropy.append(-torch.linalg.vecdot(log_softmax.exp(), log_softmax))
        return torch.cat(logp), torch.cat(entropy)


def _loss_gradient(
    logp: Tensor, entropy: Tensor, token_pair: Tensor, token_head: Tensor, tokens: slice, loss_of: ChunkLoss
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss of some tokens, and its derivative by the log-probs of the pairs and the entropies of the heads."""
    with torch.enable_grad():
        logp, entropy = logp.detach().requires_grad_(), entropy.detach().requires_grad_()
        loss = loss_of(logp.index_select(0, token_pair), entropy.index_select(0, token_head), tokens)
        by_logp, by_entropy = torch.autograd.grad(loss, (logp, entropy), allow_unused=True)
    return loss.detach(), torch.zeros_like(logp) if by_logp is None else by_logp, by_entropy


class _HeadLoss(torch.autograd.Function):
    """``(hidden, weight, bias) -> loss``; the gradients are made in ``forward`` and only scaled in ``backward``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        batch: PackTensors,
        loss_of: ChunkLoss,
        whole_rows: bool,
    ) -> Tensor:
        head = _Head(hidden, weight, bias, batch)
        ctx.by_hidden = torch.empty_like(hidden)
        ctx.by_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        ctx.by_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        ctx.dtype = weight.dtype
        total = hidden.new_zeros((), dtype=torch.float32)
        if whole_rows:
            logp, entropy = head.score()
            everything = slice(0, len(batch.token_pair))
            total, all_logp, all_entropy = _loss_gradient(
                logp, entropy, batch.token_pair, batch.token_head, everything, loss_of
            )
        for chunk in head.chunks():
            log_softmax = head.log_softmax(chunk)
            softmax = log_softmax.exp()
            entropy = -torch.linalg.vecdot(softmax, log_softmax)
            if whole_rows:
                by_logp = all_logp[chunk.pairs]
                by_entropy = None if all_entropy is None else all_entropy[chunk.heads]
            else:
                logp = log_softmax[chunk.pair_head, chunk.pair_target]
                loss, by_logp, by_entropy = _loss_gradient(
                    logp, entropy, chunk.token_pair, chunk.token_head, chunk.tokens, loss_of
                )
                total = total + loss
            by_logits = _logit_gradient(softmax, log_softmax, entropy, chunk, by_logp, by_entropy)
            if batch.temperature is not None:
                by_logits = by_logits.div_(batch.temperature[chunk.heads])
            by_logits = by_logits.to(weight.dtype)
            ctx.by_hidden[chunk.heads] = by_logits @ weight
            if ctx.by_weight is not None:
                ctx.by_weight += by_logits.T @ hidden[chunk.heads]
            if ctx.by_bias is not None:
                ctx.by_bias += by_logits.sum(0)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (ctx.by_hidden, ctx.by_weight, ctx.by_bias)
        scaled = (None if gradient is None else gradient.mul_(by_loss).to(ctx.dtype) for gradient in gradients)
        return *scaled, None, None, None


def _logit_gradient(
    softmax: Tensor, log_softmax: Tensor, entropy: Tensor, chunk: _Chunk, by_logp: Tensor, by_entropy: Tensor | None
) -> Tensor:
    """Gradient by the logits [C, V]; made in place of ``softmax``.

    A log-prob contributes onehot - softmax, an entropy -softmax * (log_softmax + entropy).
    """
    by_head = torch.zeros_like(entropy).index_add_(0, chunk.pair_head, by_logp)
    scale = -by_head[:, None]
    if by_entropy is not None:
        scale = scale - by_entropy[:, None] * (log_softmax + entropy[:, None])
    gradient = softmax.mul_(scale)
    gradient[chunk.pair_head, chunk.pair_target] += by_logp  # pairs are distinct
    return gradient


class PackedPolicy(nn.Module):
    """A causal LM of transformers (or a peft model around one) that reads packs; shard it as the FSDP2 root.

    ``PackedPolicy(model)`` switches the model to packed attention. ``fully_shard`` each of ``policy.layers``, then the
    policy itself; the wrapped model is ``policy.model`` (save that one: its names are those of the HF checkpoint).
    ``compute_dtype`` is that of the activations where it differs from the parameters' (mixed precision).
    """

    def __init__(self, model: Any, *, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype or next(model.parameters()).dtype
        causal = self.causal
        register_attention()
        causal.set_attn_implementation(ATTENTION)
        head = causal.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise UserError(f"the LM head is a {type(head).__name__}: expected a plain linear layer without an adapter")
        for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
            if getattr(causal.config, name, None) not in (None, 1.0):
                raise UserError(f"{type(causal).__name__} scales its logits ({name}): this model is not supported")

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def causal(self) -> Any:
        """The causal LM itself, without a peft wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def body(self) -> Any:
        """The causal LM without its head."""
        return getattr(self.causal, self.causal.base_model_prefix)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.body.layers

    def forward(self, batch: PackTensors, loss_of: ChunkLoss | None = None, whole_rows: bool = False) -> Tensor:
        """The summed loss of the pack's tokens (a scalar to call ``backward`` on, once).

        Without ``loss_of``: the log-probs [N] of the tokens, in the pack's order, without gradients.
        """
        hidden = self._hidden(batch)
        head = self.causal.get_output_embeddings()
        if loss_of is None:
            return _Head(hidden, head.weight, head.bias, batch).score()[0].index_select(0, batch.token_pair)
        return _HeadLoss.apply(hidden, head.weight, head.bias, batch, loss_of, whole_rows)

    def _hidden(self, batch: PackTensors) -> Tensor:
        """Final hidden states at the heads, [H, D]."""
        body = self.body
        if body.config._attn_implementation != ATTENTION:
            raise RuntimeError(
                f"attention is {body.config._attn_implementation!r}, which would mix the rows of a pack: "
                f"expected {ATTENTION!r}, was the attention implementation changed after PackedPolicy was made?"
            )
        out = body(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, attention_plan=batch.plan
        )
        return out.last_hidden_state[0].index_select(0, batch.head_node)
