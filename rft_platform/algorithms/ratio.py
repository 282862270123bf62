"""Log of an importance ratio, clamped so that its exponential is finite."""

from torch import Tensor

LOG_RATIO_CLAMP = 20.0


def log_ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    """``logp - other_logp`` clamped to +-20; the gradient is 0 outside."""
    return (logp - other_logp).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
