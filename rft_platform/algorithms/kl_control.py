"""Coefficient of a KL penalty in the reward: fixed or adaptive (Ziegler et al., arXiv 1909.08593, section 2.2)."""

from dataclasses import asdict, dataclass, replace
from typing import Any

LARGEST_ERROR = 0.2


@dataclass(frozen=True, slots=True)
class KlControl:
    """A coefficient in nats of reward per nat of KL, and its initial value."""

    initial: float
    coef: float

    @classmethod
    def start(cls, coef: float) -> "KlControl":
        """Start at ``coef``, without any adaptation."""
        return cls(coef, coef)

    @classmethod
    def of(cls, saved: dict[str, Any] | None) -> "KlControl | None":
        """Restore from the result of ``to_json``."""
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
