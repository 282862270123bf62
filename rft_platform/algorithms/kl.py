"""KL to a reference: per-token estimators (Schulman, "Approximating KL Divergence"), and the penalty's coefficient.

With d = ref_logp - logp on tokens sampled from the policy: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1. As a loss term, k1
has expected gradient 0, k2 has the gradient of KL(policy || reference), and k3 has that of KL(reference || policy).
So a KL in the reward uses k1, and a KL in the loss uses k2.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rft_platform.algorithms.common.ratio import log_ratio
from rft_platform.algorithms.common.registry import unknown_name
from rft_platform.common.errors import UserError

LARGEST_ERROR = 0.2  # bound of the relative error ``kl / target - 1`` in one update of the adaptive coefficient


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


@dataclass(frozen=True, slots=True)
class KlControl:
    """Coefficient of a KL penalty in the reward, in nats of reward per nat of KL: fixed or adaptive.

    The adaptation is that of Ziegler et al., arXiv 1909.08593, section 2.2.
    """

    initial: float
    coef: float

    @classmethod
    def start(cls, coef: float) -> "KlControl":
        """A control with the coefficient ``coef`` that has not been adapted yet."""
        return cls(coef, coef)

    @classmethod
    def of(cls, saved: dict[str, Any] | None) -> "KlControl | None":
        """Restore a control from the result of ``to_json``; None if ``saved`` is None."""
        return None if saved is None else cls(**saved)

    def to_json(self) -> dict[str, float]:
        """JSON value for a checkpoint."""
        return asdict(self)

    def adapted(self, kl: float, tokens: float, target: float, horizon: float) -> "KlControl":
        """Adapt the coefficient towards ``target`` nats, after ``tokens`` tokens with a mean KL of ``kl`` nats each.

        ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(tokens / horizon, 1))``. The share of the horizon is
        bounded, so that one large batch cannot change the sign of the coefficient.
        """
        error = min(max(kl / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        return replace(self, coef=self.coef * (1.0 + error * min(tokens / horizon, 1.0)))
