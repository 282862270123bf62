"""Specification of a training objective: the one set of names for loss, KL, correction and aggregation. No torch."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """The policy loss by name, its options, and what is added to it (``objective.Objective`` computes it)."""

    policy_loss: str = "ppo"
    policy_loss_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    beta: float = 0.0  # weight of the KL to the reference model; 0: no reference model is loaded
    entropy_coef: float = 0.0
    kl_loss: str = "k2"  # estimator of that KL
    loss_norm_length: int | None = None  # constant length by which seq-mean-token-sum-norm divides
    token_mask: tuple[float, float] | None = None  # mask tokens whose trainer / engine ratio is outside
    row_mask: tuple[float, float] | None = None  # mask rows whose geometric mean ratio is outside
    correction: Literal["bypass", "decoupled"] = "bypass"  # decoupled: ratio to the trainer's own old log-probs
    weight_cap: float = 2.0  # largest importance weight of a correction
