"""Parts of section ``algorithm`` that have keys of their own."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rft_platform.config.buffer import TaskFormat
from rft_platform.config.section import Section

Estimator = Literal["k1", "k2", "k3"]
Bounds = tuple[NonNegativeFloat, PositiveFloat]


class KlLossArgs(Section):
    """Arguments of ``kl_loss_fn``."""

    kl_coef: NonNegativeFloat = 0.0
    """The weight beta; at 0 no reference model is loaded."""


class EntropyLossArgs(Section):
    """Arguments of ``entropy_loss_fn``."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus; negative: a penalty."""


class KlPenaltyArgs(Section):
    """Arguments of ``kl_penalty_fn``."""

    kl_coef: NonNegativeFloat = 0.0
    """Reward that a nat of KL costs; at 0 there is no penalty."""
    target: PositiveFloat | None = None
    """Adapt the coefficient towards this KL, in nats a token."""
    horizon: PositiveFloat = 10_000.0
    """Tokens over which it adapts."""


class RolloutCorrection(Section):
    """What makes up for the difference between the engine that sampled and the trainer."""

    mode: Literal["bypass", "decoupled"] = "bypass"
    """``bypass``: the ratio is to the engine's own log-probs. ``decoupled``: it is to the trainer's at the start of the
    training, which costs a forward pass, and tokens are weighted by trainer / engine."""
    weight_cap: PositiveFloat = 2.0
    """Largest such weight."""
    token_mask: Bounds | None = None
    """Leave out tokens whose trainer / engine ratio is outside, [0.5, 5] for instance."""
    sequence_mask: Bounds | None = None
    """Leave out rows whose geometric mean ratio is outside."""

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
    """The soft over-long penalty: 0 up to ``max_length - cache_length`` tokens, then down to -1 at ``max_length``."""

    weight: NonNegativeFloat | None = None
    """Factor of the penalty in the reward; default: the preset's (dapo 1, others 0)."""
    max_length: PositiveInt | None = None
    """Tokens of a response; default: ``model.max_response_tokens``."""
    cache_length: PositiveInt | None = None
    """Tokens before that in which the penalty grows; default: a fifth of ``max_length``."""

    @model_validator(mode="after")
    def _inside(self) -> "Overlong":
        if self.max_length is not None and (self.cache_length or 0) > self.max_length:
            raise ValueError(
                f"algorithm.filters.overlong.cache_length {self.cache_length} is more than max_length {self.max_length}"
            )
        return self


class ExperienceFilters(Section):
    """Which judged rows train; what is not given comes from the preset."""

    zero_variance: bool | None = None
    """Leave out groups whose runs all have the same reward (dynamic sampling; dapo: true)."""
    max_batches: PositiveInt | None = None
    """Batches of tasks that may be sampled, the first included, until ``buffer.batch_size`` groups are not left out so
    (dapo: 3, others 1)."""
    reward_threshold: float | None = None
    """Leave out runs with a lower reward (rejection sampling; rft: 1)."""
    overlong: Overlong = Overlong()


class Experts(Section):
    """Demonstrations that are mixed in among the rollouts of every round (``mix``)."""

    path: str
    """A file, a folder of split files, or the name of a Hugging Face dataset."""
    split: str = "train"
    subset_name: str | None = None
    format: TaskFormat = TaskFormat()
    weight: float = Field(default=0.1, gt=0, lt=1)
    """Their share of the loss."""
    batch_size: PositiveInt | None = None
    """Demonstrations an optimiser step; default: ``weight`` of the experiences of a step."""
