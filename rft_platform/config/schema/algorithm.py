"""Section ``algorithm`` (``Algorithm``) and its subsections."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rft_platform.config.schema.buffer import TaskFormat
from rft_platform.config.schema.section import Options, Section

Estimator = Literal["k1", "k2", "k3"]
Bounds = tuple[NonNegativeFloat, PositiveFloat]


class KlLossArgs(Section):
    """Arguments of ``kl_loss_fn``."""

    kl_coef: NonNegativeFloat = 0.0
    """The weight beta of the KL term. At 0 no reference model is loaded."""


class EntropyLossArgs(Section):
    """Arguments of ``entropy_loss_fn``."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus; a negative weight is a penalty."""


class KlPenaltyArgs(Section):
    """Arguments of ``kl_penalty_fn``."""

    kl_coef: NonNegativeFloat = 0.0
    """Reward subtracted per nat of KL; 0 disables the penalty."""
    target: PositiveFloat | None = None
    """Adapt the coefficient towards this KL, in nats per token."""
    horizon: PositiveFloat = 10_000.0
    """Number of tokens over which the coefficient adapts."""


class RolloutCorrection(Section):
    """Corrections for the difference between the engine's log-probs and the trainer's."""

    mode: Literal["bypass", "decoupled"] | None = None
    """``bypass``: the policy ratio uses the engine's rollout log-probs. ``decoupled``: the policy ratio uses the
    trainer's log-probs at the start of the training, which costs one forward pass, and each token is weighted by the
    ratio trainer / engine. Default: the preset's (gspo: decoupled, others: bypass)."""
    weight_cap: PositiveFloat = 2.0
    """Upper bound of an importance weight."""
    weight_level: Literal["token", "sequence"] = "token"
    """``sequence``: the weight of a token is the product of the ratios of its row. The expected gradient is then exact
    below the bound, and the weights vary more as rows get longer."""
    weight_bound: Literal["truncate", "mask"] = "truncate"
    """A weight above ``weight_cap`` becomes ``weight_cap`` (``truncate``) or 0 (``mask``)."""
    token_mask: Bounds | None = None
    """Exclude tokens whose trainer / engine ratio is outside these bounds: [low, high], for example [0.5, 5]."""
    sequence_mask: Bounds | None = None
    """Exclude rows whose trainer / engine ratio is outside these bounds: [low, high]."""
    sequence_mask_ratio: Literal["geometric", "product"] = "geometric"
    """The ratio of a row for ``sequence_mask``: the geometric mean over its tokens, or their product."""
    token_veto: PositiveFloat | None = None
    """Exclude rows that have a token whose trainer / engine ratio is smaller, for example 1e-4."""

    @model_validator(mode="after")
    def _ordered(self) -> "RolloutCorrection":
        for name in ("token_mask", "sequence_mask"):
            bounds = getattr(self, name)
            if bounds is not None and not bounds[0] < bounds[1]:
                raise ValueError(
                    f"algorithm.rollout_correction.{name} {list(bounds)}: expected [low, high], low < high"
                )
        return self


class Overlong(Section):
    """The soft over-long penalty: 0 up to ``max_length - cache_length`` tokens, linearly to -1 at ``max_length``."""

    weight: NonNegativeFloat | None = None
    """Factor of the penalty in the reward. Default: the preset's (dapo 1, others 0)."""
    max_length: PositiveInt | None = None
    """Length limit of a response, in tokens. Default: ``model.max_response_tokens``."""
    cache_length: PositiveInt | None = None
    """Number of tokens before ``max_length`` over which the penalty grows. Default: a fifth of ``max_length``."""

    @model_validator(mode="after")
    def _inside(self) -> "Overlong":
        if self.max_length is not None and (self.cache_length or 0) > self.max_length:
            raise ValueError(
                f"algorithm.filters.overlong.cache_length {self.cache_length} is more than max_length {self.max_length}"
            )
        return self


class ExperienceFilters(Section):
    """Filters that keep judged rows out of training. A key that is not set takes the preset's value."""

    zero_variance: bool | None = None
    """Drop groups whose runs all have the same reward (dynamic sampling; dapo: true)."""
    max_batches: PositiveInt | None = None
    """Maximum number of task batches that one explore batch may sample, the first included, until ``buffer.batch_size``
    groups pass the zero-variance filter (dapo: 3, others 1)."""
    reward_threshold: float | None = None
    """Drop runs with a lower reward (rejection sampling; rft: 1)."""
    overlong: Overlong = Overlong()


class Experts(Section):
    """Demonstrations that are mixed with the rollouts of every round (algorithm ``mix``)."""

    path: str | None = Field(default=None, min_length=1)
    """A file, a folder of split files, or the name of a Hugging Face dataset. null, online training only: the
    corrections that users gave in their feedback."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Subset (configuration) of a Hugging Face dataset, or subfolder of a folder."""
    format: TaskFormat = TaskFormat()
    weight: float = Field(default=0.1, gt=0, lt=1)
    """Share of the demonstrations in the loss; with ``warmup_steps`` or ``decay_steps`` the largest share."""
    warmup_steps: NonNegativeInt = 0
    """Optimiser steps at the start of the run in which the share rises linearly from 0 to ``weight``."""
    decay_steps: NonNegativeInt = 0
    """Optimiser steps after these in which the share falls from ``weight`` to ``final_weight``, along half a cosine."""
    final_weight: float | None = Field(default=None, ge=0, lt=1)
    """Share after ``warmup_steps`` and ``decay_steps``. Default: ``weight``."""
    batch_size: PositiveInt | None = None
    """Demonstrations per optimiser step. Default: ``weight`` times the experiences of a step."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """AdamW and its learning-rate schedule over optimiser steps."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: NonNegativeInt = 0
    """Optimiser steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up: none, or a decay to 0 at ``total_steps``."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """AdamW's moment decay rates, each at least 0 and below 1."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    clip_grad: PositiveFloat = 1.0
    """Maximum gradient norm."""
    total_steps: PositiveInt | None = None
    """Step at which the decay ends. Default: the optimiser steps of the whole run, at one row a run. Set it if runs
    have several model calls: their rows give more steps."""


class Critic(Optimizer):
    """The value model of PPO and its own optimizer, whose steps are counted from the critic's first update."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic."""
    value_clip: PositiveFloat = 0.2
    """Clip range of the value loss: a value that has moved towards its return by more than this range since the start
    of the training has no gradient."""
    warmup_steps: NonNegativeInt = 0
    """Optimiser steps at the start that train only the critic. The learning-rate schedule of the policy begins
    after them."""


class Algorithm(Section):
    """The algorithm. ``algorithm_type`` selects a preset; every other key overrides a part of the preset."""

    algorithm_type: str = "grpo"
    """Name of the preset (docs/algorithms.md)."""
    advantage_fn: str | None = None
    """Advantage function instead of the preset's."""
    advantage_fn_args: Options = Field(default_factory=dict)
    """Options of the advantage function."""
    policy_loss_fn: str | None = None
    """Policy loss instead of the preset's."""
    policy_loss_fn_args: Options = Field(default_factory=dict)
    """Options of the policy loss."""
    kl_loss_fn: Estimator | None = None
    """Estimator of the KL term in the loss; default k2. As a loss, k1 has no gradient in expectation."""
    kl_loss_fn_args: KlLossArgs = KlLossArgs()
    kl_penalty_fn: Estimator | None = None
    """Estimator of the KL penalty in the reward; default k1."""
    kl_penalty_fn_args: KlPenaltyArgs = KlPenaltyArgs()
    entropy_loss_fn: Literal["default", "none"] | None = None
    """``none`` disables the entropy bonus regardless of its coefficient."""
    entropy_loss_fn_args: EntropyLossArgs = EntropyLossArgs()
    repeat_times: PositiveInt | None = None
    """Runs per task (the group size). Default: the preset's."""
    epochs: PositiveInt = 1
    """Passes over the rows of a round, each in another order. Advantages, critic values and the denominator of the
    policy ratio are those of the round's start in all passes."""
    teacher_model_path: str | None = None
    """The teacher model (gkd, on_policy_distill): a folder, a Hugging Face name or ``models:/NAME@alias``."""
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    loss_agg_mode: str | None = None
    """Aggregation of per-token losses into one loss. Default: the preset's."""
    loss_norm_length: PositiveInt | None = None
    """Divisor of ``seq-mean-token-sum-norm``. Default: ``model.max_response_tokens``."""
    rollout_correction: RolloutCorrection = RolloutCorrection()
    filters: ExperienceFilters = ExperienceFilters()
    experts: Experts | None = None
    plugins: list[str] = Field(default_factory=list)
    """Your own modules to import first; they register advantages and losses by decorators."""

    @property
    def beta(self) -> float:
        """Weight of the KL term in the loss."""
        return self.kl_loss_fn_args.kl_coef

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus."""
        return 0.0 if self.entropy_loss_fn == "none" else self.entropy_loss_fn_args.entropy_coef
