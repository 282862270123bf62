"""Sections ``algorithm``, ``trainer`` and ``warm_start``: the algorithm and the processes that train."""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rft_platform.config.schema.algorithm import (
    EntropyLossArgs,
    Estimator,
    ExperienceFilters,
    Experts,
    KlLossArgs,
    KlPenaltyArgs,
    RolloutCorrection,
)
from rft_platform.config.schema.buffer import TaskFormat
from rft_platform.config.schema.section import Section


class Optimizer(Section):
    """AdamW and its learning-rate schedule over optimiser steps."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: NonNegativeInt = 0
    """Optimiser steps of linear warm-up from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up: none, or a decay to 0 at ``total_steps``."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    clip_grad: PositiveFloat = 1.0
    """Maximum gradient norm."""
    total_steps: PositiveInt | None = None
    """Step at which the decay ends. Default: the optimiser steps of the whole run."""


class Critic(Optimizer):
    """The value model of PPO and its own optimizer. Its steps are counted from its first update."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic."""
    value_clip: PositiveFloat = 0.2
    """Clip range of the value loss: a value that moved further than this from its value at the start of the training,
    towards its return, has no gradient."""
    warmup_steps: NonNegativeInt = 0
    """Number of first optimiser steps that train the critic only."""


class Algorithm(Section):
    """The algorithm. ``algorithm_type`` selects a preset; every other key overrides a part of the preset."""

    algorithm_type: str = "grpo"
    """Name of the preset (docs/algorithms.md)."""
    advantage_fn: str | None = None
    """Advantage function in place of the preset's."""
    advantage_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Its options."""
    policy_loss_fn: str | None = None
    """Policy loss in place of the preset's."""
    policy_loss_fn_args: dict[str, Any] = Field(default_factory=dict)
    """Its options."""
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


class Rendezvous(Section):
    """Where the nodes of a trainer group meet, if the group spans the ``node_num`` nodes of ``cluster``."""

    endpoint: str | None = None
    """``host:port`` on the node of the control plane. Without it only that node trains."""
    timeout_s: PositiveFloat = 900.0
    """Seconds that a node waits for the other nodes."""


class Trainer(Section):
    """The trainer group and its checkpoints."""

    save_interval: PositiveInt | None = None
    """Optimiser steps between periodic checkpoints during a training. The end of a training always publishes a
    checkpoint."""
    save_hf_checkpoint: Literal["last", "always", "never"] = "last"
    """Which checkpoints contain Hugging Face weights: ``last``: the one at the end; ``always``: the periodic ones too;
    ``never``: none (offline training only)."""
    max_checkpoints_to_keep: PositiveInt | None = None
    """Number of newest policies whose weights are kept. The champion's weights and all manifests are always kept.
    Default: all."""
    keep_every: PositiveInt | None = None
    """In addition to ``max_checkpoints_to_keep``, keep the weights of policies at multiples of this number of optimiser
    steps."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Accepted for compatibility: sequences are not split over GPUs, so it must be 1."""
    max_token_len_per_gpu: PositiveInt = 16384
    """Maximum tokens of a packed forward pass."""
    grad_clip: PositiveFloat | None = None
    """Synonym of ``algorithm.optimizer.clip_grad``."""
    total_steps: PositiveInt | None = None
    """Optimiser steps after which training ends."""
    trainer_config: dict[str, Any] = Field(default_factory=dict)
    """Accepted for compatibility, without effect: settings of another framework's trainer."""
    gradient_accumulation_steps: PositiveInt = 1
    """Batches of ``buffer.train_batch_size`` experiences whose gradients are accumulated into one optimiser step."""
    nproc: PositiveInt = 1
    """Worker processes per node: one per GPU."""
    rendezvous: Rendezvous = Rendezvous()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of activations and published weights; master weights are float32. ``auto``: bfloat16 on GPUs, float32
    elsewhere."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are summed over ranks."""
    cpu_offload: bool = False
    """Keep parameters, gradients and AdamW's moments in host memory; the GPU holds only what the current layer
    needs."""
    gradient_checkpointing: bool = False
    """Recompute a layer's activations in the backward pass: less memory, a third more work."""
    torch_compile: bool | None = None
    """Compile the layers for packs of a few static lengths. Default: on for GPUs in bfloat16, where it halves the time
    of a step after half a minute of compilation in the first one; off elsewhere."""
    threads: PositiveInt = 1
    """CPU threads per worker."""
    idle_timeout_s: PositiveFloat = 900.0
    """The group ends after so many seconds without a request."""
    heartbeat_timeout_s: float = Field(default=120.0, ge=10.0)
    """If there is no heartbeat (one every 2 s, also during a long step) for so many seconds, the group is ended and the
    phase retried."""


class WarmStart(Section):
    """Supervised fine-tuning before the first round."""

    path: str
    """Demonstrations: a file, a folder of split files, or the name of a Hugging Face dataset. A row holds a prompt and
    a response, or a column ``messages`` (tool calls included) and optionally ``tools``."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Subset (configuration) of a Hugging Face dataset."""
    format: TaskFormat = TaskFormat()
    batch_size: PositiveInt = 256
    """Demonstrations per optimiser step."""
    steps: PositiveInt = 400
    """Maximum number of optimiser steps."""
    eval_every: PositiveInt = 25
    """Optimiser steps between two evaluations for ``stop_at``."""
    stop_at: float | None = Field(default=None, ge=0, le=1)
    """The warm start ends when the sampled pass rate on the first evaluation taskset reaches this value."""
    cooldown_steps: NonNegativeInt = 30
    """Final optimiser steps over which the learning rate falls to 0; used only if ``stop_at`` is set."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
