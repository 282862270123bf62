"""Losses by name: what a loss gets, what it gives, and what the step must know about it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rft_platform.algorithms.registry import Registry, check_arguments


@dataclass(slots=True)
class TokenBatch:
    """Trainable tokens, one element a (row, token), in any order; all tensors are float32 [N] but ``row``.

    Only ``logp`` and ``entropy`` carry gradients. ``behaviour_logp`` (of the policy that sampled) is there for
    policy-gradient losses, ``reference_logp`` where a KL to a reference model is asked for.
    """

    logp: Tensor
    entropy: Tensor
    advantage: Tensor
    row: Tensor  # int64 [N]: which of the ``rows`` rows the token belongs to
    rows: int
    behaviour_logp: Tensor | None = None
    reference_logp: Tensor | None = None


@dataclass(slots=True)
class TokenLoss:
    """``loss`` [N], to be weighted and summed by the caller; ``metrics`` are sums over the tokens (0-dim tensors)."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[..., TokenLoss]
"""``(TokenBatch, *, options) -> TokenLoss``."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered loss."""

    function: LossFunction
    policy_gradient: bool  # needs behaviour log-probs of unrenormalised sampling; advantage 0 means gradient 0
    whole_rows: bool  # looks at all tokens of a row together (a sequence-level ratio)


LOSSES: Registry[PolicyLoss] = Registry("policy_loss_fn", "rft_platform.algorithms.losses")


def loss(
    name: str, *, policy_gradient: bool = True, whole_rows: bool = False
) -> Callable[[LossFunction], LossFunction]:
    """Register the decorated function under ``name`` (``algorithm.policy_loss_fn`` of the configuration)."""

    def decorate(function: LossFunction) -> LossFunction:
        LOSSES.add(name, PolicyLoss(function, policy_gradient, whole_rows))
        return function

    return decorate


def bind(name: str, args: dict[str, Any]) -> PolicyLoss:
    """The loss called ``name`` with its options filled in; UserError for an unknown name or option."""
    entry = LOSSES.get(name)
    check_arguments(f"policy loss {name!r}", entry.function, args)
    return PolicyLoss(functools.partial(entry.function, **args), entry.policy_gradient, entry.whole_rows)
