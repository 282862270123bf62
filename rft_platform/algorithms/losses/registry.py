"""Registry of policy losses: their inputs and outputs, and the properties that the optimiser step must know.

``row_sum`` and ``row_mean`` are for losses that need whole rows.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rft_platform.algorithms.common.ratio import log_ratio
from rft_platform.algorithms.common.registry import Registry, check_arguments
from rft_platform.common.errors import UserError


@dataclass(slots=True)
class TokenBatch:
    """Trainable tokens, one element per (row, token), in any order; all tensors are float32 [N] unless noted.

    Only ``logp``, ``entropy`` and ``divergence`` carry gradients. Policy-gradient losses get ``rollout_logprobs`` and
    ``old_logprobs``, the denominator of the loss's ratio. ``old_logprobs`` defaults to ``rollout_logprobs`` (the
    correction ``bypass``: see ``objective``). ``reference_logprobs`` are set if a reference model is needed.
    """

    logp: Tensor
    entropy: Tensor
    advantage: Tensor
    row: Tensor  # int64 [N]: the token's row, 0..rows-1
    rows: int
    rollout_logprobs: Tensor | None = None  # under the distribution that sampled the tokens
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    divergence: Tensor | None = None  # to the teacher's full distribution, for ``teacher`` losses
    row_group: Tensor | None = None  # int64 [rows], for ``whole_groups`` losses: equal for the rows of a pair
    expert: Tensor | None = None  # 1.0 on tokens of demonstrations mixed into rollouts, else 0.0
    selected: Tensor | None = None  # 1.0 on the tokens that the loss's ``selects`` chose, else 0.0
    kl_baseline: Tensor | None = None  # for ``mismatched`` losses: the step's KL estimate, in nats, on every token

    def __post_init__(self) -> None:
        if self.old_logprobs is None:
            self.old_logprobs = self.rollout_logprobs

    def log_ratio(self) -> Tensor:
        """Log of the loss's ratio, ``logp - old_logprobs``, clamped to +-20; where it is clamped, the gradient is 0."""
        assert self.old_logprobs is not None, "the step checks this for every policy-gradient loss"
        return log_ratio(self.logp, self.old_logprobs)


@dataclass(slots=True)
class TokenLoss:
    """``loss`` [N], which the caller weights and sums; ``metrics`` are sums over the tokens (0-dim tensors)."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[..., TokenLoss]
"""``(TokenBatch, *, options) -> TokenLoss``."""

Total = Callable[[np.ndarray], np.ndarray]
"""Sum of a float64 vector over all ranks; every rank gets the result and must make the same calls."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """All trained tokens of an optimiser step on this rank; float64 [N] each."""

    logp: np.ndarray  # in the denominator of the loss's ratio
    advantage: np.ndarray
    draw: np.ndarray  # random numbers from 0 to 1 that belong to the token's row, in whatever order rows are computed
    total: Total
    #: S of each token as ``PolicyLoss.entropy_change`` says; empty if the loss does not read it
    entropy_change: np.ndarray = field(default_factory=lambda: np.zeros(0))


Selection = Callable[..., np.ndarray]
"""``(StepTokens, *, options) -> bool [N]``: the tokens to select. Its options are options of the loss, by name."""

Correction = Literal["ratio", "weight", "none"]
"""How a loss corrects for tokens that another policy sampled: by the ratio in the loss; by a detached weight, which
``objective`` applies to a loss without a ratio; or only by the loss's own clip or gate."""


EntropyChange = Literal["plain", "centred"]
"""``plain``: S = p (H + log p) of a token, p its probability and H the entropy; ``centred``: less its expectation over
the distribution. If the token's logit rises, H changes by ``-S`` to first order."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered loss."""

    function: LossFunction
    policy_gradient: bool  # reads advantages and rollout log-probs of plain sampling
    zero_advantage_is_inert: bool = False  # a token with advantage 0 has loss 0 and gradient 0, whatever its log-probs
    whole_rows: bool = False  # needs all tokens of a row together (a sequence-level ratio)
    whole_groups: bool = False  # needs all rows of a group together (a preference pair); implies ``whole_rows``
    reference: bool = False  # needs the reference model's log-probs
    mismatched: bool = False  # needs the KL to the reference on answers to other prompts: ``TokenBatch.kl_baseline``
    teacher: bool = False  # uses the divergence to the teacher's full distribution
    experts: bool = False  # also learns from demonstrations mixed into rollouts (``TokenBatch.expert``)
    correction: Correction = "ratio"
    whole_rows_if: str | None = None  # name of the option that, if true, sets ``whole_rows``
    beta: float | None = None  # selects the divergence of ``teacher`` losses: the option's default or bound value
    loss_agg_modes: tuple[str, ...] | None = None  # aggregations that keep the loss's objective; None: all
    selects: Selection | None = None  # selects tokens of the whole step before packing: ``TokenBatch.selected``
    entropy_change: EntropyChange | None = None  # ``selects`` reads ``StepTokens.entropy_change``, computed like this


LOSSES: Registry[PolicyLoss] = Registry("policy_loss_fn", "rft_platform.algorithms.losses")


def loss(
    name: str,
    *,
    policy_gradient: bool = True,
    zero_advantage_is_inert: bool = False,
    whole_rows: bool = False,
    whole_groups: bool = False,
    reference: bool = False,
    mismatched: bool = False,
    teacher: bool = False,
    experts: bool = False,
    correction: Correction = "ratio",
    whole_rows_if: str | None = None,
    loss_agg_modes: tuple[str, ...] | None = None,
    selects: Selection | None = None,
    entropy_change: EntropyChange | None = None,
) -> Callable[[LossFunction], LossFunction]:
    """Register the decorated function under ``name`` (``algorithm.policy_loss_fn`` of the configuration).

    ``zero_advantage_is_inert`` declares that a token with advantage 0 has loss 0 and gradient 0 for any log-probs; the
    trainer then leaves out rows and steps without an advantage. ``loss_agg_modes`` are the values of
    ``algorithm.loss_agg_mode`` that the loss allows; None allows all. ``mismatched`` losses are losses of pairs; they
    cost a forward pass of one more row for each row. ``selects`` is called once per optimiser step;
    ``entropy_change`` says what it reads besides log-probs and advantages, at the price of a forward pass.
    Raises ValueError for a ``teacher`` loss without the option ``beta``, which selects its divergence, and if
    ``whole_rows_if`` is not an option of the loss.
    """

    def decorate(function: LossFunction) -> LossFunction:
        if whole_rows_if is not None and whole_rows_if not in inspect.signature(function).parameters:
            raise ValueError(f"@loss({name!r}): whole_rows_if {whole_rows_if!r} is no option of {function.__name__}")
        entry = PolicyLoss(
            function=function,
            policy_gradient=policy_gradient,
            zero_advantage_is_inert=zero_advantage_is_inert,
            whole_rows=whole_rows or whole_groups,
            whole_groups=whole_groups,
            reference=reference or mismatched,
            mismatched=mismatched,
            teacher=teacher,
            experts=experts,
            correction=correction,
            whole_rows_if=whole_rows_if,
            beta=_default_beta(name, function) if teacher else None,
            loss_agg_modes=loss_agg_modes,
            selects=selects,
            entropy_change=entropy_change,
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
    """Return the loss called ``name`` with its options bound. Raises UserError for an unknown name or option."""
    entry = LOSSES.get(name)
    check_arguments(f"policy loss {name!r}", entry.function, args)
    options = {option: p.default for option, p in inspect.signature(entry.function).parameters.items()} | args
    whole_rows = entry.whole_rows or bool(entry.whole_rows_if and options[entry.whole_rows_if])
    beta = options["beta"] if entry.teacher else None
    if beta is not None and not 0 <= beta <= 1:
        raise UserError(f"beta of the loss {name!r} is {beta}: expected a number from 0 (KL(T||S)) to 1 (KL(S||T))")
    selects = None if entry.selects is None else _bound_selection(entry.selects, options)
    function = functools.partial(entry.function, **args)
    return replace(entry, function=function, whole_rows=whole_rows, beta=beta, selects=selects)


def _bound_selection(selects: Selection, options: dict[str, Any]) -> Selection:
    """``selects`` with those options of the loss that it has."""
    names = [p.name for p in inspect.signature(selects).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return functools.partial(selects, **{name: options[name] for name in names})


def row_sum(values: Tensor, tokens: TokenBatch) -> Tensor:
    """Sum of ``values`` [N] over each row's tokens, [rows]; 0 for a row without tokens."""
    return values.new_zeros(tokens.rows).index_add(0, tokens.row, values)


def row_count(tokens: TokenBatch) -> Tensor:
    """Number of tokens of each row, at least 1, [rows]."""
    return row_sum(torch.ones_like(tokens.logp), tokens).clamp(min=1)


def row_mean(values: Tensor, tokens: TokenBatch) -> Tensor:
    """Mean of ``values`` [N] over each row's tokens, [rows]."""
    return row_sum(values, tokens) / row_count(tokens)
