"""The LM head over a pack: log-probs, entropies and the loss of its tokens. The forward pass computes the gradient.

Hidden states are used only where a token is predicted, and each distinct (state, target) is computed once. The LM head
runs in chunks: logits, log-softmax, the loss of the chunk's tokens and its gradient; then the logits are freed. So no
[tokens, vocabulary] tensor is larger than a chunk. Logits are computed once, but twice for losses that need whole rows,
because these need all log-probs first. On CUDA the operations on a chunk's logits are compiled once, so all chunks have
one size and the last chunk is padded.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rft_platform.training.packed.attention import AttentionPlan, plan_attention, to_device
from rft_platform.training.packed.packing import Pack

CHUNK_ELEMENTS = 1 << 27  # logits per chunk: 512 MiB in float32, about three times that at the peak
FUSED_ELEMENTS = 1 << 29  # on CUDA: 1 GiB in bfloat16, twice that at the peak
FUSED_HEADS = 8192  # upper limit of heads per chunk, for small vocabularies


@dataclass(slots=True)
class PackTensors:
    """The parts of a ``Pack`` that the model needs, on its device."""

    input_ids: Tensor  # int64 [1, T], padding included
    position_ids: Tensor  # int64 [1, T]
    plan: AttentionPlan
    head_node: Tensor  # int64 [H]
    temperature: Tensor | None  # float32 [H, 1]; None: all 1
    pair_head: Tensor  # int64 [P]
    pair_target: Tensor  # int64 [P]
    token_pair: Tensor  # int64 [N]
    token_head: Tensor  # int64 [N]
    first_pair: np.ndarray  # int64 [H + 1], on the CPU: where each head's pairs start
    first_token: np.ndarray  # int64 [P + 1], where each pair's tokens start

    @classmethod
    def of(cls, pack: Pack, device: torch.device, dtype: torch.dtype) -> "PackTensors":
        """The pack's rows as tensors on ``device``; ``dtype`` is that of the activations."""
        move = partial(to_device, device=device)
        padding = np.zeros(pack.length - len(pack.input_ids), np.int64)
        heads, pairs = len(pack.head_node), len(pack.pair_head)
        return cls(
            move(np.append(pack.input_ids, padding))[None],
            move(np.append(pack.position_ids, padding))[None],
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
"""``(logp [n], entropy [n], slice of the pack's tokens) -> summed loss``. Called once per chunk."""


@dataclass(slots=True)
class Chunk:
    """A range of heads with their (state, target) pairs and tokens. Indices in the tensors start at 0 in each chunk."""

    heads: slice
    pairs: slice
    tokens: slice
    pair_head: Tensor
    pair_target: Tensor
    token_pair: Tensor
    token_head: Tensor


def _chunks(batch: PackTensors, size: int) -> Iterator[Chunk]:
    count = len(batch.head_node)
    for start in range(0, count, size):
        stop = min(start + size, count)
        pairs = slice(int(batch.first_pair[start]), int(batch.first_pair[stop]))
        tokens = slice(int(batch.first_token[pairs.start]), int(batch.first_token[pairs.stop]))
        yield Chunk(
            slice(start, stop),
            pairs,
            tokens,
            batch.pair_head[pairs] - start,
            batch.pair_target[pairs],
            batch.token_pair[tokens] - pairs.start,
            batch.token_head[tokens] - start,
        )


@dataclass(slots=True)
class Distributions:
    """Next-token distributions of a chunk's heads at their temperature: either ``logits`` or ``log_softmax`` is set."""

    log_sum: Tensor | None  # float32 [C'], with ``logits``
    logits: Tensor | None  # raw, [C', V] with C' >= C: padded for the CUDA kernels
    log_softmax: Tensor | None  # float32 [C, V], instead of ``log_sum`` and ``logits``
    softmax: Tensor | None  # float32 [C, V], with ``log_softmax``; its memory is reused for the gradient
    temperature: Tensor | None  # float32 [C', 1]
    entropy: Tensor  # float32 [C]
    logp: Tensor  # float32 [P], of the chunk's pairs

    @classmethod
    def fused(cls, logits: Tensor, temperature: Tensor | None, chunk: Chunk) -> "Distributions":
        """Build from raw ``logits`` on CUDA."""
        log_sum, entropy = _fused_kernels()[0](logits, temperature)
        target = logits[chunk.pair_head, chunk.pair_target].float()
        if temperature is not None:
            target = target / temperature[chunk.pair_head, 0]
        heads = chunk.heads.stop - chunk.heads.start
        return cls(log_sum, logits, None, None, temperature, entropy[:heads], target - log_sum[chunk.pair_head])

    @classmethod
    def plain(cls, log_softmax: Tensor, temperature: Tensor | None, chunk: Chunk) -> "Distributions":
        """Build from log-probs [C, V] that are already computed."""
        softmax = log_softmax.exp()
        entropy = -torch.linalg.vecdot(softmax, log_softmax)
        logp = log_softmax[chunk.pair_head, chunk.pair_target]
        return cls(None, None, log_softmax, softmax, temperature, entropy, logp)

    def gradient(self, chunk: Chunk, by_logp: Tensor | None, by_entropy: Tensor | None) -> Tensor:
        """Return the gradient with respect to the raw logits [C, V]. Call it only once."""
        if self.log_softmax is not None and self.softmax is not None:
            by_logits = logit_gradient(self.softmax, self.log_softmax, self.entropy, chunk, by_logp, by_entropy)
            return by_logits if self.temperature is None else by_logits.div_(self.temperature)
        assert self.logits is not None and self.log_sum is not None
        by_logp = torch.zeros_like(self.logp) if by_logp is None else by_logp
        heads, missing = len(self.entropy), len(self.log_sum) - len(self.entropy)
        by_head = torch.zeros_like(self.log_sum).index_add_(0, chunk.pair_head, by_logp)
        by_entropy = torch.zeros_like(self.entropy) if by_entropy is None else by_entropy
        entropy, padded = (pad(x, (0, missing)) for x in (self.entropy, by_entropy))
        result = _fused_kernels()[1](self.logits, self.temperature, self.log_sum, entropy, by_head, padded)
        target = by_logp - self.logp.exp() * (
            by_head[chunk.pair_head] + by_entropy[chunk.pair_head] * (self.logp + self.entropy[chunk.pair_head])
        )
        if self.temperature is not None:
            target = target / self.temperature[chunk.pair_head, 0]
        result[chunk.pair_head, chunk.pair_target] = target.to(result.dtype)  # no (head, target) occurs twice
        return result[:heads]


@dataclass(slots=True)
class LMHead:
    """The LM head and its input states."""

    hidden: Tensor  # [H, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None
    batch: PackTensors

    @property
    def is_fused(self) -> bool:
        """Whether compiled kernels compute the chunks."""
        return self.hidden.is_cuda and self.hidden.dtype != torch.float32

    @property
    def fused_heads(self) -> int:
        """Heads per chunk if the kernels are fused."""
        return max(1, min(FUSED_HEADS, FUSED_ELEMENTS // len(self.weight)))

    def chunks(self, elements: int | None = None) -> Iterator[Chunk]:
        """Yield ranges of heads with at most ``elements`` logits each, but at least one head."""
        if elements is None and self.is_fused:
            return _chunks(self.batch, self.fused_heads)
        return _chunks(self.batch, max(1, (elements or CHUNK_ELEMENTS) // len(self.weight)))

    def distributions(self, chunk: Chunk) -> Distributions:
        """Return the distributions of a chunk from ``chunks()``."""
        temperature = None if self.batch.temperature is None else self.batch.temperature[chunk.heads]
        if not self.is_fused:
            return Distributions.plain(self.log_softmax(chunk), temperature, chunk)
        hidden = self.hidden[chunk.heads]
        if missing := self.fused_heads - len(hidden):
            hidden = pad(hidden, (0, 0, 0, missing))
            temperature = None if temperature is None else pad(temperature, (0, 0, 0, missing), value=1.0)
        return Distributions.fused(nn.functional.linear(hidden, self.weight, self.bias), temperature, chunk)

    def log_softmax(self, chunk: Chunk) -> Tensor:
        """Log-probs of a chunk's heads, float32 [C, V]."""
        logits = nn.functional.linear(self.hidden[chunk.heads], self.weight, self.bias).float()
        if self.batch.temperature is not None:
            logits = logits.div_(self.batch.temperature[chunk.heads])
        return torch.log_softmax(logits, -1)

    @torch.no_grad()
    def score(self) -> tuple[Tensor, Tensor]:
        """Return the log-probs of all pairs and the entropies of all heads."""
        logp, entropy = [], []
        for chunk in self.chunks():
            found = self.distributions(chunk)
            logp.append(found.logp)
            entropy.append(found.entropy)
        return torch.cat(logp), torch.cat(entropy)


@dataclass(slots=True)
class HeadGradient:
    """Gradient of a loss with respect to the head's input and parameters, accumulated chunk by chunk."""

    by_hidden: Tensor
    by_weight: Tensor | None  # float32; None if it is not needed
    by_bias: Tensor | None
    dtype: torch.dtype

    @classmethod
    def zeros(cls, head: LMHead, needed: Sequence[bool]) -> "HeadGradient":
        """Start at zero. ``needed`` is autograd's ``needs_input_grad``: hidden, weight, bias."""
        by_weight = torch.zeros_like(head.weight, dtype=torch.float32) if needed[1] else None
        by_bias = torch.zeros_like(head.bias, dtype=torch.float32) if head.bias is not None and needed[2] else None
        return cls(torch.empty_like(head.hidden), by_weight, by_bias, head.weight.dtype)

    def add(self, head: LMHead, chunk: Chunk, by_logits: Tensor) -> None:
        """Add the part of one chunk, from its gradient with respect to the raw logits [C, V]."""
        by_logits = by_logits.to(self.dtype)
        self.by_hidden[chunk.heads] = by_logits @ head.weight
        if self.by_weight is not None:
            self.by_weight += by_logits.T @ head.hidden[chunk.heads]
        if self.by_bias is not None:
            self.by_bias += by_logits.sum(0)

    def scaled(self, by_loss: Tensor) -> Iterator[Tensor | None]:
        """Yield the gradients of hidden, weight and bias, multiplied by the incoming gradient."""
        for gradient in (self.by_hidden, self.by_weight, self.by_bias):
            yield None if gradient is None else gradient.mul_(by_loss).to(self.dtype)


def loss_gradient(
    loss_of: Callable[..., Tensor], tokens: slice, *sources: tuple[Tensor, Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss of some tokens and its derivative with respect to each source; None for an unused source.

    A source is (values of pairs or heads, index of the value of each token). ``loss_of`` gets the values per token.
    """
    with torch.enable_grad():
        leaves = [values.detach().requires_grad_() for values, _ in sources]
        per_token = [leaf.index_select(0, index) for leaf, (_, index) in zip(leaves, sources, strict=True)]
        loss = loss_of(per_token[0], per_token[1], tokens, *per_token[2:])
        return loss.detach(), list(torch.autograd.grad(loss, leaves, allow_unused=True))


class HeadLoss(torch.autograd.Function):
    """``(hidden, weight, bias) -> loss``. ``forward`` computes the gradients; ``backward`` only scales them."""

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
        """Return the loss; keep its gradients for ``backward``."""
        head = LMHead(hidden, weight, bias, batch)
        ctx.gradient = gradient = HeadGradient.zeros(head, ctx.needs_input_grad)
        total = hidden.new_zeros((), dtype=torch.float32)
        chunks = list(head.chunks())
        whole_rows = whole_rows and len(chunks) > 1  # a single chunk holds whole rows: nothing is computed twice
        if whole_rows:
            logp, entropy = head.score()
            everything = slice(0, len(batch.token_pair))
            total, (all_logp, all_entropy) = loss_gradient(
                loss_of, everything, (logp, batch.token_pair), (entropy, batch.token_head)
            )
        for chunk in chunks:
            found = head.distributions(chunk)
            if whole_rows:
                by_logp = None if all_logp is None else all_logp[chunk.pairs]
                by_entropy = None if all_entropy is None else all_entropy[chunk.heads]
            else:
                loss, (by_logp, by_entropy) = loss_gradient(
                    loss_of, chunk.tokens, (found.logp, chunk.token_pair), (found.entropy, chunk.token_head)
                )
                total = total + loss
            gradient.add(head, chunk, found.gradient(chunk, by_logp, by_entropy))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients, scaled by ``by_loss``."""
        return *ctx.gradient.scaled(by_loss), None, None, None


def logit_gradient(
    softmax: Tensor,
    log_softmax: Tensor,
    entropy: Tensor,
    chunk: Chunk,
    by_logp: Tensor | None,
    by_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient with respect to the logits after temperature [C, V]. It overwrites ``softmax``.

    A log-prob contributes onehot - softmax, an entropy -softmax * (log_softmax + entropy).
    """
    if by_logp is None:
        by_logp = softmax.new_zeros(len(chunk.pair_head))
    by_head = torch.zeros_like(entropy).index_add_(0, chunk.pair_head, by_logp)
    scale = -by_head[:, None]
    if by_entropy is not None:
        scale = scale - by_entropy[:, None] * (log_softmax + entropy[:, None])
    gradient = softmax.mul_(scale)
    gradient[chunk.pair_head, chunk.pair_target] += by_logp  # no (head, target) occurs twice
    return gradient


def _statistics(logits: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy of ``logits`` [C, V] divided by ``temperature`` [C, 1]; both float32 [C]."""
    values = logits.float() if temperature is None else logits.float() / temperature
    log_sum = torch.logsumexp(values, -1)
    entropy = log_sum - ((values - log_sum[:, None]).exp() * values).sum(-1)
    return log_sum, entropy


def _gradient(
    logits: Tensor, temperature: Tensor | None, log_sum: Tensor, entropy: Tensor, by_head: Tensor, by_entropy: Tensor
) -> Tensor:
    """Gradient [C, V] with respect to the raw logits, in their dtype, without the terms of the target tokens.

    ``by_head`` [C] is the gradient with respect to the sum of a head's log-probs, ``by_entropy`` [C] that with respect
    to its entropy. A log-prob contributes onehot - softmax, an entropy -softmax * (log_softmax + entropy).
    """
    values = logits.float() if temperature is None else logits.float() / temperature
    logp = values - log_sum[:, None]
    result = -logp.exp() * (by_head[:, None] + by_entropy[:, None] * (logp + entropy[:, None]))
    return (result if temperature is None else result / temperature).to(logits.dtype)


@functools.cache
def _fused_kernels() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Return ``_statistics`` and ``_gradient`` compiled to CUDA kernels.

    Run one by one, log-softmax, probabilities, entropy and gradient read and write a float32 [heads, vocabulary] tensor
    about ten times. The compiled kernels read the logits directly, in the dtype of the activations.
    """
    return torch.compile(_statistics, dynamic=False), torch.compile(_gradient, dynamic=False)
