"""What the LM head needs of a chunk of logits, on CUDA: each in few passes over them, compiled once a chunk size.

Run one operation after the other, log-softmax, probabilities, entropy and gradient read and write a float32
[heads, vocabulary] tensor about ten times; compiled, the logits are read as they are, in the activations' format.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def statistics(logits: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials, and entropy, of tempered ``logits`` [C, V] by ``temperature`` [C, 1]; float32."""
    values = logits.float() if temperature is None else logits.float() / temperature
    log_sum = torch.logsumexp(values, -1)
    entropy = log_sum - ((values - log_sum[:, None]).exp() * values).sum(-1)
    return log_sum, entropy


def gradient(
    logits: Tensor, temperature: Tensor | None, log_sum: Tensor, entropy: Tensor, by_head: Tensor, by_entropy: Tensor
) -> Tensor:
    """Gradient [C, V] by the raw logits, in their format, but for the targets' own share.

    ``by_head`` [C] is that by the sum of a head's log-probs, ``by_entropy`` [C] by its entropy: a log-prob
    contributes onehot - softmax, an entropy -softmax * (log_softmax + entropy).
    """
    values = logits.float() if temperature is None else logits.float() / temperature
    logp = values - log_sum[:, None]
    result = -logp.exp() * (by_head[:, None] + by_entropy[:, None] * (logp + entropy[:, None]))
    return (result if temperature is None else result / temperature).to(logits.dtype)


@functools.cache
def compiled() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """``statistics`` and ``gradient`` as CUDA kernels."""
    return torch.compile(statistics, dynamic=False), torch.compile(gradient, dynamic=False)
