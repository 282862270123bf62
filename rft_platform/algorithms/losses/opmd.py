"""Online policy mirror descent (Kimi k1.5, arXiv 2501.12599; Trinity-RFT's simplified form, arXiv 2505.17826)."""

from pydantic import NonNegativeFloat

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss


@loss("opmd", zero_advantage_is_inert=True, correction="weight")
def opmd(tokens: TokenBatch, *, tau: NonNegativeFloat = 1.0) -> TokenLoss:
    """``-A logp / (1 + tau)``: a larger ``tau`` keeps each update closer to the policy that sampled."""
    return TokenLoss(-tokens.advantage * tokens.logp / (1 + tau))
