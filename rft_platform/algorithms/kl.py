"""Per-token estimators of the KL divergence to a reference (Schulman, "Approximating KL Divergence").

With d = ref_logp - logp on tokens sampled from the policy: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1. As a LOSS term, k1
has no gradient in expectation, k2 has the gradient of KL(policy || reference) and k3 that of KL(reference || policy).
So a KL in the reward uses k1, and a KL in the loss uses k2.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rft_platform.algorithms.ratio import log_ratio
from rft_platform.algorithms.registry import unknown_name
from rft_platform.errors import UserError


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``logp - ref_logp``: unbiased, signed, high variance."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``(ref_logp - logp)^2 / 2``."""
    return 0.5 * (ref_logp - logp).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``e^d - d - 1``, never negative; d is clamped to +-20 so that exp stays finite."""
    d = log_ratio(ref_logp, logp)
    return torch.expm1(d) - d


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the estimator called ``name``; raise UserError for an unknown name."""
    if name not in KL_ESTIMATORS:
        raise UserError(unknown_name("KL estimator", name, KL_ESTIMATORS))
    return KL_ESTIMATORS[name]
