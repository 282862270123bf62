"""The score-function estimator (REINFORCE, Williams 1992, doi 10.1007/BF00992696)."""

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("reinforce", zero_advantage_is_inert=True, correction="weight")
def reinforce(tokens: TokenBatch) -> TokenLoss:
    """``-A logp``; the objective multiplies it by a detached weight ``min(pi / pi_rollout, cap)`` per token."""
    return TokenLoss(-tokens.advantage * tokens.logp)
