"""Sections ``algorithm`` and ``trainer``: what is optimised, and the processes that do it."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rft_platform.config.algorithm_parts import (
    EntropyLossArgs,
    Estimator,
    ExperienceFilters,
    Experts,
    KlLossArgs,
    KlPenaltyArgs,
    RolloutCorrection,
)
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


class Critic(Optimizer):
    """The value model beside the policy (PPO) and the optimizer of its own; steps are counted from its first update."""

    lr: PositiveFloat = 1e-5
    value_clip: PositiveFloat = 0.2
    """How far a value may move from the one at the start of a training before its loss stops pulling."""
    warmup_steps: NonNegativeInt = 0
    """First optimiser steps in which the critic alone is trained."""


class Algorithm(Section):
    """The algorithm by its preset; every other key overrides one of the preset's choices."""

    algorithm_type: str = "grpo"
    advantage_fn: str | None = None
    advantage_fn_args: dict[str, Any] = Field(default_factory=dict)
    policy_loss_fn: str | None = None
    policy_loss_fn_args: dict[str, Any] = Field(default_factory=dict)
    kl_loss_fn: Estimator | None = None
    """Estimator of the KL term of the loss; default k2. As a loss k1 has no gradient in expectation."""
    kl_loss_fn_args: KlLossArgs = KlLossArgs()
    kl_penalty_fn: Estimator | None = None
    """Estimator of the KL penalty in the reward; default k1."""
    kl_penalty_fn_args: KlPenaltyArgs = KlPenaltyArgs()
    entropy_loss_fn: Literal["default", "none"] | None = None
    """``none`` leaves the bonus out whatever its coefficient."""
    entropy_loss_fn_args: EntropyLossArgs = EntropyLossArgs()
    repeat_times: PositiveInt | None = None
    """Runs of a task (the group size); default: the preset's."""
    teacher_model_path: str | None = None
    """The model to learn from (gkd, on_policy_distill): a folder, a Hugging Face name or ``models:/NAME@alias``."""
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    loss_agg_mode: str | None = None
    """How per-token losses become one; default: the preset's."""
    loss_norm_length: PositiveInt | None = None
    """Constant that ``seq-mean-token-sum-norm`` divides by; default: ``model.max_response_tokens``."""
    rollout_correction: RolloutCorrection = RolloutCorrection()
    filters: ExperienceFilters = ExperienceFilters()
    experts: Experts | None = None
    plugins: list[str] = Field(default_factory=list)
    """Modules of yours to import first: they register advantages and losses by decorators."""

    @property
    def beta(self) -> float:
        """Weight of the KL term of the loss."""
        return self.kl_loss_fn_args.kl_coef

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus."""
        return 0.0 if self.entropy_loss_fn == "none" else self.entropy_loss_fn_args.entropy_coef


class Rendezvous(Section):
    """Where the nodes of a trainer group meet, if it spans the ``node_num`` of ``cluster``."""

    endpoint: str | None = None
    """``host:port`` on the node of the control plane; without it that node alone trains."""
    timeout_s: PositiveFloat = 900.0
    """Seconds a node waits for the others."""


class Trainer(Section):
    """The trainer group and its checkpoints."""

    save_interval: PositiveInt | None = None
    """Optimiser steps between checkpoints on the way through a training; it always publishes one at its end."""
    save_hf_checkpoint: Literal["last", "always", "never"] = "last"
    """Which of them hold Hugging Face weights: that at the end, those on the way too, or (offline training) none."""
    max_checkpoints_to_keep: PositiveInt | None = None
    """Newest policies whose weights are kept; the champion's always are, manifests too. Default: all."""
    keep_every: PositiveInt | None = None
    """Beside ``max_checkpoints_to_keep``: policies at multiples of so many optimiser steps keep their weights too."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    max_token_len_per_gpu: PositiveInt = 16384
    """Tokens a packed forward pass may hold."""
    grad_clip: PositiveFloat | None = None
    """The same as ``algorithm.optimizer.clip_grad``."""
    total_steps: PositiveInt | None = None
    """Optimiser steps after which training ends."""
    trainer_config: dict[str, Any] = Field(default_factory=dict)
    gradient_accumulation_steps: PositiveInt = 1
    """Batches of ``buffer.train_batch_size`` experiences whose gradients make one optimiser step."""
    nproc: PositiveInt = 1
    """Worker processes a node: one a GPU."""
    rendezvous: Rendezvous = Rendezvous()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Format of activations and published weights; master weights are float32. ``auto``: bfloat16 on GPUs."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of gradients while they are summed over ranks."""
    cpu_offload: bool = False
    """Keep parameters, gradients and AdamW's moments in host memory, and on the GPU what a layer needs now."""
    gradient_checkpointing: bool = False
    """Compute a layer's activations again in the backward pass: less memory, a third more work."""
    torch_compile: bool | None = None
    """Compile the layers, for packs of few static lengths. Default: on GPUs in bfloat16, where it halves a step's time
    after half a minute of compiling in the first; off elsewhere."""
    threads: PositiveInt = 1
    """CPU threads a worker."""
    idle_timeout_s: PositiveFloat = 900.0
    """Seconds without a request after which the group ends."""
    heartbeat_timeout_s: float = Field(default=120.0, ge=10.0)
    """Seconds without a heartbeat (one every 2 s, also during a long step) after which the group is ended and the phase
    repeated."""


class WarmStart(Section):
    """Supervised fine-tuning before the first round."""

    path: str
    """Demonstrations: a file, a folder of split files, or the name of a Hugging Face dataset. Its rows hold a prompt
    and a response, or a column ``messages`` (tool calls included) and perhaps ``tools``."""
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
