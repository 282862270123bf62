"""The logarithm of an importance ratio, kept where its exponential is finite."""

from torch import Tensor

LOG_RATIO_CLAMP = 20.0


def log_ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    """``logp - other_logp`` clamped to +-20; beyond that there is no gradient."""
    return (logp - other_logp).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
