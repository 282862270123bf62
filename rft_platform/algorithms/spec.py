"""Specifications of a training as plain values: objective, optimizer, adapter, critic and KL penalty.

``config.resolve`` makes them from the configuration, and the trainer receives them, so both use the same names. This
module does not import torch.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """The policy loss by name, its options, and the terms that ``objective.Objective`` adds to the loss."""

    policy_loss: str = "ppo"
    policy_loss_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    beta: float = 0.0  # weight of the KL to the reference model; 0: no reference model is loaded
    entropy_coef: float = 0.0
    kl_loss: str = "k2"  # estimator of the KL to the reference model
    loss_norm_length: int | None = None  # constant length by which seq-mean-token-sum-norm divides
    token_mask: tuple[float, float] | None = None  # mask tokens whose trainer / engine ratio is outside (low, high)
    row_mask: tuple[float, float] | None = None  # mask rows whose ratio is outside (low, high)
    row_mask_ratio: Literal["geometric", "product"] = "geometric"  # combines a row's ratios
    token_veto: float | None = None  # mask rows that have a token with a smaller trainer / engine ratio
    correction: Literal["bypass", "decoupled"] = "bypass"  # see ``objective``; decoupled: the trainer computes pi_old
    weight_cap: float = 2.0  # largest importance weight of a correction
    weight_level: Literal["token", "sequence"] = "token"  # the ratio of a weight: each token's, or the row's product
    weight_bound: Literal["truncate", "mask"] = "truncate"  # a weight above the cap becomes the cap, or 0


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW and its learning-rate schedule over global optimiser steps."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8
    clip_grad: float = 1.0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = 0
    schedule_start: int = 0  # global step at which the schedule (warm-up, then decay) begins
    total_steps: int | None = None  # end of the decay; needed by linear and cosine


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A LoRA adapter to train instead of the full weights."""

    rank: int = 32
    alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """A value model that is trained in the same steps as the policy, with its own optimizer (PPO)."""

    folder: str | None = None  # HF model whose body initialises the critic; None: the policy's body
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1e-5))
    value_clip: float = 0.2  # a value that moved further than this towards its return has no gradient
    warmup_steps: int = 0  # optimiser steps that train the critic only


@dataclass(frozen=True, slots=True)
class KlPenaltySpec:
    """A KL penalty in the reward of each token, for algorithms with token advantages."""

    estimator: str = "k1"
    coef: float = 0.0
    target: float | None = None  # adapt ``coef`` towards this KL in nats per token (Ziegler et al., arXiv 1909.08593)
    horizon: float = 10_000.0  # tokens over which ``coef`` adapts


@dataclass(frozen=True, slots=True)
class ExpertSchedule:
    """A schedule of the demonstrations' share in the loss (mu of CHORD, arXiv 2508.11408)."""

    warmup_steps: int = 0  # the share rises linearly from 0 to its peak
    decay_steps: int = 0  # then it falls to ``final``, along half a cosine
    final: float = 0.0

    def share(self, peak: float, step: int) -> float:
        """The share in optimiser step ``step``, from 0."""
        if step < self.warmup_steps:
            return peak * step / self.warmup_steps
        done = step - self.warmup_steps
        if done >= self.decay_steps:
            return self.final
        return self.final + (peak - self.final) * (1 + math.cos(math.pi * done / self.decay_steps)) / 2


@dataclass(frozen=True, slots=True)
class AlgorithmSpec(ObjectiveSpec):
    """Objective, token advantage and critic by name, with their arguments."""

    token_advantage: str | None = None  # computed in the trainer (needs values or log-probs); None: as judged
    token_advantage_args: dict[str, Any] = field(default_factory=dict)
    kl_penalty: KlPenaltySpec | None = None
    critic: CriticSpec | None = None
    expert_weight: float | None = None  # share (0 to 1) of the demonstrations in the loss ``mix``
    expert_schedule: ExpertSchedule | None = None  # how the demonstrations' share changes; None: constant
    plugins: tuple[str, ...] = ()  # modules to import first; they register user functions

    def at_step(self, step: int) -> "AlgorithmSpec":
        """This algorithm with the demonstrations' share of optimiser step ``step``."""
        if self.expert_weight is None or self.expert_schedule is None:
            return self
        return replace(self, expert_weight=self.expert_schedule.share(self.expert_weight, step))
