"""The coefficient of a KL penalty in the reward, fixed or adaptive (Ziegler et al., arXiv 1909.08593, section 2.2)."""

from dataclasses import asdict, dataclass, replace
from typing import Any

LARGEST_ERROR = 0.2


@dataclass(frozen=True, slots=True)
class KlControl:
    """A coefficient in nats of reward a nat of KL, and where it began."""

    initial: float
    coef: float

    @classmethod
    def start(cls, coef: float) -> "KlControl":
        """At ``coef``, before any adaptation."""
        return cls(coef, coef)

    @classmethod
    def of(cls, saved: dict[str, Any] | None) -> "KlControl | None":
        """What ``to_json`` gave."""
        return None if saved is None else cls(**saved)

    def to_json(self) -> dict[str, float]:
        """As kept in a checkpoint."""
        return asdict(self)

    def adapted(self, kl: float, tokens: float, target: float, horizon: float) -> "KlControl":
        """After ``tokens`` tokens with a mean KL of ``kl`` nats each, towards ``target`` nats.

        ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(tokens / horizon, 1))``: the share of the horizon is
        bounded, so that one large batch cannot turn the sign of the coefficient.
        """
        error = min(max(kl / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        return replace(self, coef=self.coef * (1.0 + error * min(tokens / horizon, 1.0)))
