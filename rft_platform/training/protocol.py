"""Interface between the platform and the trainer group: launch settings, requests, progress, results and errors.

Events travel as JSON objects, one per line (``service/command_server.py``). Does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from pydantic import TypeAdapter, ValidationError

from rft_platform.algorithms.spec import AlgorithmSpec, LoraSpec, OptimizerSpec
from rft_platform.common import errors
from rft_platform.common.errors import RftError, TrainerError, UserError

Message = dict[str, Any]

PREFIX = "/trainer/"  # prefix of all paths of the trainer's HTTP server
LAST_EVENTS = ("done", "error")

#: Event that a separate thread of the trainer sends while a command waits or runs. The caller uses it to distinguish a
#: long step or compilation from a stopped process.
HEARTBEAT = "heartbeat"
HEARTBEAT_S = 2.0
#: Default time that a caller waits for the next event of a command before it ends the trainer.
HEARTBEAT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Settings that change the time and memory of a step. They change the step's result by rounding only."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of gradient sums over ranks
    #: Gather weights, and sum gradients over the ranks, once a step instead of once a pack. This takes more memory. The
    #: gradients of a rank's packs are added up in ``reduce_dtype``.
    reduce_once: bool = False
    cpu_offload: bool = False  # keep parameters, gradients and moments in host memory; needs CUDA
    gradient_checkpointing: bool = False  # recompute a layer's activations in the backward pass
    frees_gpu: bool = False  # between two commands keep only the state on the GPU: an engine uses it, too
    compile: bool | None = None  # torch.compile each layer, for packs of few lengths; None: see ``compiles``

    def compiles(self, device_type: str, *, float32: bool) -> bool:
        """Whether layers are compiled on this device. Default: on CUDA, except in float32."""
        return (device_type == "cuda" and not float32) if self.compile is None else self.compile

    def check(self, device_type: str) -> None:
        """Raise UserError for options that this device does not support."""
        if self.reduce_once and self.reduce_dtype != "float32":
            raise UserError(
                f"reduce_once adds up the gradients of packs in reduce_dtype {self.reduce_dtype}: use float32"
            )
        if self.cpu_offload and device_type != "cuda":
            raise UserError("trainer.cpu_offload moves parameters from a GPU to the host: without a GPU turn it off")


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """Train from one checkpoint on some files, and publish the result.

    The worker reloads ``parent`` unless it already holds exactly the parent's state. A repeated request therefore gives
    the same weights. The training data is one of

    - ``rollouts`` and ``judged``: Parquet files joined on ``row_id``, all rows or those of ``selection``; with
      ``expert_weight`` also ``demonstrations``;
    - ``demonstrations``: a Parquet file with a column ``messages`` (JSON), or text columns ``prompt``, ``response`` and
      optionally ``system``;
    - ``preferences``: a Parquet file with messages (JSON): ``prompt``, ``chosen`` and ``rejected``, or ``prompt``,
      ``completion`` and ``label``.
    """

    parent: str  # folder of an HF model or of a platform checkpoint
    parent_version: int  # global optimiser step of ``parent``
    output: str  # parent folder of the result: the worker appends ``global_step_<n>``
    algorithm: AlgorithmSpec
    optimizer: OptimizerSpec
    rollouts: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    selection: str | None = None  # Parquet file with ``row_id`` and ``use``: the rows to take; None: all
    demonstrations: str | None = None
    preferences: str | None = None
    train_batch_size: int = 512  # experiences (or demonstrations, or pairs) per optimiser step
    expert_batch_size: int | None = None  # demonstrations per step; None: expert_weight * train_batch_size
    #: Seed of the order of the demonstrations beside rollouts: with the parent's, this training continues the parent's
    #: order. None: ``seed``.
    expert_seed: int | None = None
    max_steps: int | None = None  # rollouts: upper limit; demonstrations: exact number, ``epochs`` is ignored
    epochs: int = 1  # passes over the rows
    data_position: int | None = None  # demonstrations or pairs already used; None: continue after the parent's
    max_tokens_per_pack: int = 16384
    max_tokens_per_row: int | None = None  # demonstrations or pairs with a longer row are left out; None: no limit
    seed: int = 0
    fresh_optimizer: bool = False  # reset AdamW's state (the first round after a warm start)
    lora: LoraSpec | None = None
    reference: str | None = None  # folder of the frozen reference of a KL; with LoRA and None: the base model
    teacher: str | None = None  # folder of the distillation teacher; its vocabulary must be the policy's
    save_interval: int | None = None  # optimiser steps between saved states; None: one state, that of the last step
    #: When the state of the last step is written: before the result is returned (``now``), or in the background
    #: (``later``). With ``later``, a training whose steps contain no multiple of ``save_interval`` saves only weights.
    save_state: Literal["now", "later"] = "now"
    save_hf_checkpoint: Literal["last", "always", "never"] = "last"  # which checkpoints hold HF weights
    max_checkpoints_to_keep: int | None = None  # number of intermediate checkpoints with HF weights; None: keep all
    lineage: dict[str, Any] = field(default_factory=dict)  # copied into the checkpoint's manifest
    #: The project's optimiser steps before this training, if they are not those up to ``parent``: the project trained
    #: further from ``parent`` before and starts again from it. New versions count from here, so that none has the
    #: number of an earlier one.
    steps_before: int | None = None

    @property
    def counts_from(self) -> int:
        """The policy version that the first step of this training adds 1 to."""
        return self.parent_version if self.steps_before is None else self.steps_before


_REQUEST: TypeAdapter[TrainRequest] = TypeAdapter(TrainRequest)


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Progress report: one optimiser step is done."""

    step: int  # global optimiser step after the update
    metrics: dict[str, float]  # loss, grad_norm, lr, entropy, mismatch_k3, clip_fraction, tokens, ... (algorithms.md)
    reported_before: bool = field(default=False, compare=False)  # by a trainer that was killed later


#: Called with the number of steps, and of the trainings that have them, before a trainer repeats these trainings.
OnRepeat = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The published checkpoint."""

    checkpoint: str  # absolute folder
    policy_version: int
    weights_digest: str  # as ``rft_platform.common.digests`` defines it
    steps: int  # number of optimiser steps; 0 if no row had a gradient, so that the checkpoint is the parent
    metrics: dict[str, float]  # summary over the steps (``step_metrics.summarise``)
    seconds: dict[str, float]  # by phase: load, data, forward_backward, optimizer, save, ...
    cpu_seconds: float  # processor time of the worker for this request
    reused: bool = False  # an identical request had already published this checkpoint


def train_request(message: Mapping[str, Any]) -> TrainRequest:
    """Build a request from JSON values. Raises UserError if the values are not a training request."""
    try:
        return _REQUEST.validate_python(dict(message))
    except ValidationError as error:
        raise UserError(f"not a training request: {error}") from error


def error_message(error: RftError) -> Message:
    """Encode an error as the answer to a command."""
    return {"event": "error", "kind": type(error).__name__, "message": str(error), "retryable": error.retryable}


def raise_error(message: Message) -> NoReturn:
    """Raise the error that ``error_message`` encoded, with its original class if this is a class of ``errors``."""
    kind = getattr(errors, message["kind"], TrainerError)
    raise kind(message["message"])
