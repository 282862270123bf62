"""Sections ``trainer`` and ``warm_start``: the processes that train, and the training before round 1."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rft_platform.config.schema.algorithm import Optimizer
from rft_platform.config.schema.buffer import TaskFormat
from rft_platform.config.schema.section import Section


class Rendezvous(Section):
    """Where the nodes of a trainer group meet, if the group spans the ``node_num`` nodes of ``cluster``."""

    endpoint: str | None = None
    """``host:port`` on the node of the control plane. null: only the node of the control plane trains."""
    timeout_s: PositiveFloat = 900.0
    """Seconds that a node waits for the other nodes."""


class Trainer(Section):
    """The trainer group and its checkpoints."""

    save_interval: PositiveInt | None = None
    """Optimiser steps between two saves of the trainer state (float32 weights, moments). A longer training saves
    intermediate checkpoints. A round whose steps contain no multiple of ``save_interval`` saves only weights; if the
    trainer is killed, such rounds are trained again. Default: one save per training. The end of a training always
    publishes the weights."""
    save_in_background: bool = True
    """Save the trainer state of a round while the next round explores. A trainer that is killed before the state is
    complete trains the round again."""
    save_hf_checkpoint: Literal["last", "always", "never"] = "last"
    """Which checkpoints contain Hugging Face weights. ``last``: the one at the end of a training. ``always``: also the
    intermediate checkpoints. ``never``: none (offline training without ``eval_tasksets`` only)."""
    max_checkpoints_to_keep: PositiveInt | None = None
    """Number of newest policies whose weights are kept. The champion's weights and all manifests are always kept.
    Default: all."""
    keep_every: PositiveInt | None = None
    """In addition to ``max_checkpoints_to_keep``, keep the weights of policies at multiples of this number of optimiser
    steps."""
    max_token_len_per_gpu: PositiveInt | None = None
    """Maximum tokens of a packed forward pass. Default: what fits on the GPU beside the engine, at most 32,768; 16,384
    without a GPU."""
    total_steps: PositiveInt | None = None
    """Optimiser steps after which training ends."""
    gradient_accumulation_steps: PositiveInt = 1
    """Batches of ``buffer.train_batch_size`` experiences whose gradients are accumulated into one optimiser step."""
    nproc: PositiveInt = 1
    """Worker processes per node: one per GPU. They use the last GPUs of a machine, the engines use the first ones."""
    rendezvous: Rendezvous = Rendezvous()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of activations and published weights; master weights are float32. ``auto``: bfloat16 on GPUs, float32
    elsewhere."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are summed over ranks."""
    cpu_offload: bool | None = None
    """Keep parameters, gradients and AdamW's moments in host memory; the GPU holds only what the current layer
    needs. Default: only if the model does not fit otherwise."""
    gradient_checkpointing: bool | None = None
    """Recompute a layer's activations in the backward pass: less memory, a third more work. Default: only if packs of
    8,192 tokens do not fit otherwise, beside an engine whose cache holds the answers that run at once."""
    torch_compile: bool | None = None
    """Compile the layers for packs of a few static lengths. Default: on for GPUs in bfloat16, where it halves the time
    of a step after half a minute of compilation in the first one; off elsewhere."""
    threads: PositiveInt = 1
    """CPU threads per worker."""
    idle_timeout_s: PositiveFloat = 900.0
    """The group ends after this number of seconds without a request."""
    heartbeat_timeout_s: float = Field(default=120.0, ge=10.0)
    """The group sends a heartbeat every 2 s, also during a long step. If there is none for this number of seconds, the
    group is ended and the launch is retried."""


class WarmStart(Section):
    """Supervised fine-tuning before the first round."""

    path: str
    """Demonstrations: a file, a folder of split files, or the name of a Hugging Face dataset. A row holds a prompt and
    a response, or a column ``messages`` (tool calls included) and optionally ``tools``."""
    split: str = "train"
    """Split of the dataset."""
    subset_name: str | None = None
    """Subset (configuration) of a Hugging Face dataset, or subfolder of a folder."""
    format: TaskFormat = TaskFormat()
    batch_size: PositiveInt = 256
    """Demonstrations per optimiser step."""
    steps: PositiveInt = 400
    """Maximum number of optimiser steps."""
    epochs: PositiveInt | None = None
    """Passes over the demonstrations; if set, ``steps`` has no effect."""
    eval_every: PositiveInt = 25
    """Optimiser steps between two evaluations for ``stop_at``. The final weights are evaluated only once, as the
    start, if ``explorer.eval_on_startup``."""
    stop_at: float | None = Field(default=None, ge=0, le=1)
    """The warm start ends when the sampled pass rate on the first evaluation taskset reaches this value."""
    cooldown_steps: NonNegativeInt = 30
    """Final optimiser steps over which the learning rate falls to 0; used only if ``stop_at`` is set."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
