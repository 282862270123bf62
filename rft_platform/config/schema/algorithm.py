"""Subsections of section ``algorithm``."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rft_platform.config.schema.buffer import TaskFormat
from rft_platform.config.schema.section import Section

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

    mode: Literal["bypass", "decoupled"] = "bypass"
    """``bypass``: the policy ratio uses the engine's rollout log-probs. ``decoupled``: the policy ratio uses the
    trainer's log-probs at the start of the training, which costs one forward pass, and each token is weighted by the
    ratio trainer / engine."""
    weight_cap: PositiveFloat = 2.0
    """Upper bound of an importance weight."""
    token_mask: Bounds | None = None
    """Exclude tokens whose trainer / engine ratio is outside these bounds, for example [0.5, 5]."""
    sequence_mask: Bounds | None = None
    """Exclude rows whose geometric mean of the trainer / engine ratio is outside these bounds."""

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

    path: str
    """A file, a folder of split files, or the name of a Hugging Face dataset."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Subset (configuration) of a Hugging Face dataset."""
    format: TaskFormat = TaskFormat()
    weight: float = Field(default=0.1, gt=0, lt=1)
    """Share of the demonstrations in the loss."""
    batch_size: PositiveInt | None = None
    """Demonstrations per optimiser step. Default: ``weight`` times the experiences of a step."""
