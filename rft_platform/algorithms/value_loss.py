"""Loss of the critic: clipped squared error to the returns (PPO, arXiv 1707.06347; clipping: arXiv 2005.12729)."""

import torch
from torch import Tensor

from rft_platform.algorithms.losses.registry import TokenLoss


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """``0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)`` for each token; all float32 [N].

    A value that has moved further than ``clip`` from its old value towards its return has no gradient. Metrics: the
    number of such tokens, and the sums from which the explained variance is computed.
    """
    clipped = torch.clamp(value, old_value - clip, old_value + clip)
    free, bound = (value - returns).square(), (clipped - returns).square()
    with torch.no_grad():
        error = (returns - value).double()
        metrics = {
            "value": value.sum(),
            "value_clip_fraction": (bound > free).sum(),
            "value_error": error.sum(),
            "value_error_squared": error.square().sum(),
            "return": returns.sum(),
            "return_squared": returns.double().square().sum(),
        }
    return TokenLoss(0.5 * torch.maximum(free, bound), metrics)


def explained_variance(sums: dict[str, float], tokens: float) -> float:
    """``1 - Var(R - V) / Var(R)`` from the metrics' sums: 1 for a perfect critic, 0 for constant V or constant R."""
    variance = sums["return_squared"] / tokens - (sums["return"] / tokens) ** 2
    left = sums["value_error_squared"] / tokens - (sums["value_error"] / tokens) ** 2
    return 1.0 - left / variance if variance > 1e-12 else 0.0
