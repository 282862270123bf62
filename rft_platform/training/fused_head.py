"""Compiled CUDA kernels for the LM head's operations on a chunk of logits, compiled once per chunk size.

Run one by one, log-softmax, probabilities, entropy and gradient read and write a float32 [heads, vocabulary] tensor
about ten times. The compiled kernels read the logits directly, in the dtype of the activations.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def statistics(logits: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and entropy of ``logits`` [C, V] divided by ``temperature`` [C, 1]; both float32 [C]."""
    values = logits.float() if temperature is None else logits.float() / temperature
    log_sum = torch.logsumexp(values, -1)
    entropy = log_sum - ((values - log_sum[:, None]).exp() * values).sum(-1)
    return log_sum, entropy


def gradient(
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
def compiled() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """Return ``statistics`` and ``gradient`` compiled to CUDA kernels."""
    return torch.compile(statistics, dynamic=False), torch.compile(gradient, dynamic=False)
