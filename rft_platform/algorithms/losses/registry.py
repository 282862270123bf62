"""Losses by name: what a loss gets, what it gives, and what the step must know about it."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from rft_platform.algorithms.registry import Registry, check_arguments


@dataclass(slots=True)
class TokenBatch:
    """Trainable tokens, one element a (row, token), in any order; all tensors are float32 [N] but ``row``.

    Only ``logp`` and ``entropy`` carry gradients. ``behaviour_logp`` (of the policy that sampled) and ``old_logp`` (the
    denominator of the loss's ratio) are there for policy-gradient losses, ``reference_logp`` where a reference model
    is asked for. Where no ``old_logp`` is given it is ``behaviour_logp`` (the bypass correction: see ``objective``).
    """

    logp: Tensor
    entropy: Tensor
    advantage: Tensor
    row: Tensor  # int64 [N]: which of the ``rows`` rows the token belongs to
    rows: int
    behaviour_logp: Tensor | None = None
    old_logp: Tensor | None = None
    reference_logp: Tensor | None = None
    divergence: Tensor | None = None  # with a gradient: from the teacher's whole distribution, for ``teacher`` losses
    row_group: Tensor | None = None  # int64 [rows]: rows that are compared (the two of a pair), for ``whole_groups``
    expert: Tensor | None = None  # 1.0 on tokens of demonstrations that are mixed in among rollouts, else 0.0

    def __post_init__(self) -> None:
        if self.old_logp is None:
            self.old_logp = self.behaviour_logp


@dataclass(slots=True)
class TokenLoss:
    """``loss`` [N], to be weighted and summed by the caller; ``metrics`` are sums over the tokens (0-dim tensors)."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[..., TokenLoss]
"""``(TokenBatch, *, options) -> TokenLoss``."""

Correction = Literal["ratio", "weight", "none"]
"""What makes up for tokens that another policy sampled: the ratio in the loss; a detached weight on a loss that has no
ratio of its own (``objective`` multiplies it in); or nothing more than the loss's own clip or gate."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered loss."""

    function: LossFunction
    policy_gradient: bool  # needs behaviour log-probs of unrenormalised sampling; advantage 0 means gradient 0
    whole_rows: bool = False  # looks at all tokens of a row together (a sequence-level ratio)
    whole_groups: bool = False  # looks at all rows of a group together (a preference pair); implies ``whole_rows``
    reference: bool = False  # needs the reference model's log-probs
    teacher: bool = False  # is made of the divergence to the teacher's whole distribution
    experts: bool = False  # learns from demonstrations among the rollouts (``TokenBatch.expert``), too
    correction: Correction = "ratio"
    whole_rows_if: str | None = None  # the option that makes it look at whole rows
    beta: float | None = None  # which divergence, for ``teacher`` losses: the default of the option, or what is bound


LOSSES: Registry[PolicyLoss] = Registry("policy_loss_fn", "rft_platform.algorithms.losses")


def loss(
    name: str,
    *,
    policy_gradient: bool = True,
    whole_rows: bool = False,
    whole_groups: bool = False,
    reference: bool = False,
    teacher: bool = False,
    experts: bool = False,
    correction: Correction = "ratio",
    whole_rows_if: str | None = None,
) -> Callable[[LossFunction], LossFunction]:
    """Register the decorated function under ``name`` (``algorithm.policy_loss_fn`` of the configuration).

    Raises ValueError for a ``teacher`` loss without the option that chooses its divergence.
    """

    def decorate(function: LossFunction) -> LossFunction:
        whole = whole_rows or whole_groups
        beta = _default_beta(name, function) if teacher else None
        entry = PolicyLoss(
            function, policy_gradient, whole, whole_groups, reference, teacher, experts, correction, whole_rows_if, beta
        )
        LOSSES.add(name, entry, function)
        return function

    return decorate


def _default_beta(name: str, function: LossFunction) -> float:
    """Default of the keyword-only option ``beta`` of a ``teacher`` loss."""
    option = inspect.signature(function).parameters.get("beta")
    if option is None or option.kind is not option.KEYWORD_ONLY or not isinstance(option.default, int | float):
        raise ValueError(
            f"@loss({name!r}, teacher=True): expected a keyword-only option beta with a number as its default, as in "
            f"def {function.__name__}(tokens: TokenBatch, *, beta: float = 0.5); it chooses the divergence to the "
            "teacher (0: KL(T, S), 1: KL(S, T))"
        )
    return float(option.default)


def bind(name: str, args: dict[str, Any]) -> PolicyLoss:
    """The loss called ``name`` with its options filled in; UserError for an unknown name or option."""
    entry = LOSSES.get(name)
    check_arguments(f"policy loss {name!r}", entry.function, args)
    whole_rows = entry.whole_rows or bool(entry.whole_rows_if and args.get(entry.whole_rows_if))
    beta = args.get("beta", entry.beta) if entry.teacher else None
    return replace(entry, function=functools.partial(entry.function, **args), whole_rows=whole_rows, beta=beta)
