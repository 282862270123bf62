"""Supervised fine-tuning: the negative log-likelihood of the loss-masked tokens."""

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("sft", policy_gradient=False)
def sft(tokens: TokenBatch) -> TokenLoss:
    """``-logp``."""
    return TokenLoss(-tokens.logp)
