"""Online policy mirror descent (Kimi k1.5, arXiv 2501.12599; Trinity-RFT's simplified form, arXiv 2505.17826)."""

from rft_platform.algorithms.losses.registry import TokenBatch, TokenLoss, loss
from rft_platform.errors import UserError


@loss("opmd", correction="weight")
def opmd(tokens: TokenBatch, *, tau: float = 1.0) -> TokenLoss:
    """``-A logp / (1 + tau)``: the larger ``tau``, the closer each update stays to the policy that sampled.

    Raises UserError for a negative ``tau``.
    """
    if tau < 0:
        raise UserError(f"tau {tau} of policy loss 'opmd': expected 0 or more")
    return TokenLoss(-tokens.advantage * tokens.logp / (1 + tau))
