"""Sections ``algorithm`` and ``trainer``: what is optimised, and the processes that do it."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rft_platform.config.buffer import TaskFormat
from rft_platform.config.section import Section


class Optimizer(Section):
    """AdamW and its learning-rate schedule over optimiser steps."""

    lr: PositiveFloat = 1e-6
    lr_warmup_steps: NonNegativeInt = 0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 0.0
    eps: PositiveFloat = 1e-8
    clip_grad: PositiveFloat = 1.0
    """Largest gradient norm."""
    total_steps: PositiveInt | None = None
    """End of the decay; default: the optimiser steps of the whole run."""


class Algorithm(Section):
    """The algorithm by its preset; every other key overrides one of the preset's choices."""

    algorithm_type: str = "grpo"
    advantage_fn: str | None = None
    advantage_fn_args: dict[str, Any] = Field(default_factory=dict)
    policy_loss_fn: str | None = None
    policy_loss_fn_args: dict[str, Any] = Field(default_factory=dict)
    kl_loss_fn: str | None = None
    """Estimator of the KL term of the loss (k1, k2, k3)."""
    kl_loss_fn_args: dict[str, Any] = Field(default_factory=dict)
    """``kl_coef`` is the weight beta; at its default of 0 no reference model is loaded."""
    kl_penalty_fn: str | None = None
    """Estimator of the KL penalty in the reward."""
    kl_penalty_fn_args: dict[str, Any] = Field(default_factory=dict)
    entropy_loss_fn: str | None = None
    entropy_loss_fn_args: dict[str, Any] = Field(default_factory=dict)
    """``entropy_coef``: weight of the entropy bonus, 0 by default."""
    repeat_times: PositiveInt | None = None
    """Runs of a task (the group size); default: the preset's."""
    optimizer: Optimizer = Optimizer()
    loss_agg_mode: str = "token-mean"

    @property
    def beta(self) -> float:
        """Weight of the KL term of the loss."""
        return float(self.kl_loss_fn_args.get("kl_coef", 0.0))

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus."""
        return float(self.entropy_loss_fn_args.get("entropy_coef", 0.0))


class Trainer(Section):
    """The trainer group and its checkpoints."""

    save_interval: PositiveInt | None = None
    """Optimiser steps between checkpoints of the trainer service; a round always publishes one."""
    save_hf_checkpoint: Literal["last", "always", "never"] = "last"
    max_checkpoints_to_keep: PositiveInt | None = None
    ulysses_sequence_parallel_size: PositiveInt = 1
    max_token_len_per_gpu: PositiveInt = 16384
    """Tokens a packed forward pass may hold."""
    grad_clip: PositiveFloat | None = None
    """The same as ``algorithm.optimizer.clip_grad``."""
    total_steps: PositiveInt | None = None
    """Optimiser steps after which training ends."""
    trainer_config: dict[str, Any] = Field(default_factory=dict)
    nproc: PositiveInt = 1
    """Worker processes: one a GPU."""
    threads: PositiveInt = 1
    """CPU threads a worker."""
    idle_timeout_s: PositiveFloat = 900.0
    """Seconds without a request after which the group ends."""


class WarmStart(Section):
    """Supervised fine-tuning before the first round."""

    path: str
    """Demonstrations: a file, a folder of split files, or the name of a Hugging Face dataset."""
    split: str = "train"
    subset_name: str | None = None
    format: TaskFormat = TaskFormat()
    batch_size: PositiveInt = 256
    """Demonstrations an optimiser step."""
    steps: PositiveInt = 400
    """Upper bound of the optimiser steps."""
    eval_every: PositiveInt = 25
    """Optimiser steps between looks at ``stop_at``."""
    stop_at: float | None = Field(default=None, ge=0, le=1)
    """Sampled pass rate on the first evaluation taskset at which the warm start ends."""
    cooldown_steps: NonNegativeInt = 30
    """Optimiser steps after that, in which the learning rate falls to 0."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
