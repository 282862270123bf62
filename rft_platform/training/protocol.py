"""Messages between the platform and the trainer group: commands in, events out, one JSON object a line."""

from dataclasses import dataclass, field
from typing import Any, Literal

#: Event that the trainer sends while a command waits or runs, from a thread of its own: a long step, or a long
#: compilation, is told from a process that is stopped.
HEARTBEAT = "heartbeat"
HEARTBEAT_S = 2.0
#: How long a caller waits for the next event of a command before it ends the trainer, unless it is configured.
HEARTBEAT_TIMEOUT_S = 120.0


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
    """A LoRA adapter to train in place of the full weights."""

    rank: int = 32
    alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """A value model beside the policy, trained in the same steps by an optimizer of its own (PPO)."""

    folder: str | None = None  # HF model whose body it starts from; None: that of the policy
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1e-5))
    value_clip: float = 0.2  # how far a value may move from its old one before the loss stops pulling
    warmup_steps: int = 0  # optimiser steps in which the critic alone is trained


@dataclass(frozen=True, slots=True)
class KlPenaltySpec:
    """A KL penalty in the reward of each token, for algorithms with token advantages."""

    estimator: str = "k1"
    coef: float = 0.0
    target: float | None = None  # adapt ``coef`` towards this KL in nats a token (Ziegler et al., arXiv 1909.08593)
    horizon: float = 10_000.0  # tokens over which it adapts


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """Loss, token advantage and aggregation by name (``rft_platform.algorithms``), with their arguments."""

    policy_loss: str = "ppo"
    policy_loss_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    beta: float = 0.0  # weight of the KL to the reference model; 0: no reference is loaded
    entropy_coef: float = 0.0
    kl_loss: str = "k2"  # estimator of that KL
    loss_norm_length: int | None = None  # constant length that seq-mean-token-sum-norm divides by
    token_mask: tuple[float, float] | None = None  # leave out tokens whose trainer / engine ratio is outside
    row_mask: tuple[float, float] | None = None  # leave out rows whose geometric mean ratio is outside
    correction: Literal["bypass", "decoupled"] = "bypass"  # decoupled: the ratio is to the trainer's own old log-probs
    weight_cap: float = 2.0  # largest importance weight of a correction
    token_advantage: str | None = None  # made of rewards here, where values or log-probs are known; None: as judged
    token_advantage_args: dict[str, Any] = field(default_factory=dict)
    kl_penalty: KlPenaltySpec | None = None
    critic: CriticSpec | None = None
    expert_weight: float | None = None  # share of the loss that demonstrations among rollouts have (``mix``)
    plugins: tuple[str, ...] = ()  # modules to import first: they register the user's own functions


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """Train from one checkpoint on some files, and publish the result.

    The worker reloads ``parent`` unless it already holds exactly that state, so a repeated request gives the same
    weights whatever happened in between. What is trained on is one of

    - ``rollouts`` and ``judged``: Parquet files joined on ``row_id``, all rows or those of ``selection``; with
      ``expert_weight`` beside ``demonstrations``;
    - ``demonstrations``: a Parquet file with a column ``messages`` (JSON), or with ``prompt``, ``response`` and perhaps
      ``system`` as text;
    - ``preferences``: a Parquet file with ``prompt``, ``chosen`` and ``rejected``, as text or as messages (JSON).
    """

    parent: str  # folder of an HF model or of a checkpoint of ours
    parent_version: int  # global optimiser steps behind ``parent``
    output: str  # folder to publish: ``.../global_step_<n>`` is appended by the worker
    algorithm: AlgorithmSpec
    optimizer: OptimizerSpec
    rollouts: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    selection: str | None = None  # Parquet file with ``row_id`` and ``use``: the rows of those files to take; None: all
    demonstrations: str | None = None
    preferences: str | None = None
    train_batch_size: int = 512  # experiences (or demonstrations, or pairs) an optimiser step
    expert_batch_size: int | None = None  # demonstrations beside them; None: ``expert_weight`` of train_batch_size
    max_steps: int | None = None  # rollouts: at most so many steps; demonstrations: exactly so many, whatever epochs
    epochs: int = 1  # passes over the rows
    data_position: int | None = None  # demonstrations or pairs already used; None: go on where the parent stopped
    max_tokens_per_pack: int = 16384
    max_tokens_per_row: int | None = None  # demonstrations or pairs with a longer row are left out; None: none are
    seed: int = 0
    fresh_optimizer: bool = False  # start AdamW anew (the first round after a warm start)
    lora: LoraSpec | None = None
    reference: str | None = None  # folder of the frozen model that a KL is measured to; with LoRA: the base model's
    teacher: str | None = None  # folder of the model to learn from (distillation); needs the policy's own vocabulary
    save_interval: int | None = None  # optimiser steps between checkpoints on the way; None: only the last
    save_hf_checkpoint: Literal["last", "always", "never"] = "last"  # which of them hold Hugging Face weights
    max_checkpoints_to_keep: int | None = None  # of those on the way, where they hold such weights; None: all
    lineage: dict[str, Any] = field(default_factory=dict)  # copied into the checkpoint's manifest


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Progress: one optimiser step is done."""

    step: int  # global optimiser step after the update
    metrics: dict[str, float]  # loss, grad_norm, lr, entropy, mismatch_k3, clip_fraction, tokens, ... (algorithms.md)
    told_again: bool = field(default=False, compare=False)  # done by an earlier trainer, which this one goes on from


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The published checkpoint."""

    checkpoint: str  # absolute folder
    policy_version: int
    weights_digest: str  # as ``rft_platform.weights`` defines it
    steps: int  # optimiser steps done; 0 when no row carried a gradient (a recorded no-op)
    metrics: dict[str, float]  # means over the steps
    seconds: dict[str, float]  # load, data, forward_backward, optimizer, save
    cpu_seconds: float  # processor time of the worker for this request
    reused: bool = False  # an identical request had already published this checkpoint
