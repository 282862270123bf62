"""A cost model of one GRPO round: seconds of its phases, from the model's shape, the GPUs and measured constants.

Rollouts: an event simulation of continuous batching. A step over ``n`` sequences takes the launch overhead, the larger
of reading the weights and of their matrix products, the read of all keys and values (each at the speed of the data
sheet), and a constant a sequence: sampling, log-probs, HTTP, and what the device lacks to its data sheet.

Training: floating-point operations over the model FLOP utilisation (MFU), which falls with the share of a layer's work
that is not a matrix product. The formulas of operations are those of ``rft_platform.training.packed.flops``.
``calibration.py`` reads the constants from ``results/*.json``.
"""

import math
from dataclasses import dataclass

import numpy as np
from round_gpu import ENDS, Task
from shape_model import SHAPES, VOCABULARY

FORWARD_BACKWARD = 6  # operations a weight and token; 4 for frozen weights, which need no gradient of their own
FROZEN, RECOMPUTED_FORWARD = 4, 2
BYTES = 2  # of a bfloat16 number
BLOCK = 16  # tokens of a block of vLLM's cache
UNLIMITED = 1e15  # tokens
STATE_BYTES = 16  # a trained weight in the saved trainer state, and in the trainer's memory
#: Tokens of a prompt of round_gpu.py, by the tiny model's tokenizer: without the question, and of each repeat of it.
PROMPT_BASE, PROMPT_REPEAT = 10.3, 15.3


@dataclass(frozen=True)
class Gpu:
    """Data sheet of one GPU. https://www.nvidia.com/en-us/data-center/h100/ and .../h200/ (SXM, read 2026-11)."""

    name: str
    flops: float  # dense bfloat16 a second
    bandwidth: float  # bytes a second of its memory
    memory: float  # bytes


GPUS = {gpu.name: gpu for gpu in (Gpu("H100", 989e12, 3.35e12, 85.5e9), Gpu("H200", 989e12, 4.8e12, 150.7e9))}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that decide its costs."""

    layers: int
    hidden: int
    layer_weights: int  # of the matrices of all layers
    head_weights: int
    embedding_weights: int  # beside the head
    attention_width: int
    kv_width: int

    @classmethod
    def of(cls, name: str) -> "Shape":
        """The shape of ``shape_model.py`` called ``name``."""
        sizes = SHAPES[name]
        hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
        width = sizes["num_attention_heads"] * sizes["head_dim"]
        kv = sizes["num_key_value_heads"] * sizes["head_dim"]
        layer = 2 * hidden * (width + kv) + 3 * hidden * sizes["intermediate_size"]
        head = VOCABULARY * hidden
        return cls(layers, hidden, layers * layer, head, 0 if sizes["tie_word_embeddings"] else head, width, kv)

    @property
    def weights(self) -> int:
        """All parameters."""
        return self.layer_weights + self.head_weights + self.embedding_weights

    @property
    def kv_bytes(self) -> int:
        """Bytes of the key-value cache a token."""
        return 2 * BYTES * self.kv_width * self.layers

    @property
    def elementwise(self) -> float:
        """Activations of the residual stream a weight: what norms and additions cost beside the matrices."""
        return self.layers * self.hidden / self.layer_weights


@dataclass(frozen=True)
class Rows:
    """Tokens of the rows of a round. A group of rows shares its prompt."""

    prompts: np.ndarray  # of each row
    answers: np.ndarray
    group: int

    @property
    def tokens(self) -> float:
        """Prompt and answer tokens, each row counted alone."""
        return float(self.prompts.sum() + self.answers.sum())

    def dealt(self, replicas: int) -> list["Rows"]:
        """The rows of each engine replica: whole groups, in turn."""
        number = np.arange(len(self.prompts)) // self.group
        chosen = (number % replicas == replica for replica in range(replicas))
        return [Rows(self.prompts[each], self.answers[each], self.group) for each in chosen]


def rows_of(task: Task, seed: int = 0) -> Rows:
    """Rows of a task of round_gpu.py. Lengths are quantiles of their distributions in a seeded order."""
    rng, rows = np.random.default_rng(seed), task.tasks * task.group
    low, high = task.repeats
    repeats = np.floor(low + (np.arange(task.tasks) + 0.5) / task.tasks * (high + 1 - low))
    prompts = np.repeat(rng.permutation(np.round(PROMPT_BASE + PROMPT_REPEAT * repeats)), task.group)
    if task.name == "even":
        return Rows(prompts, np.full(rows, float(task.new_tokens)), task.group)
    ends = len(ENDS) / VOCABULARY
    quantiles = (np.arange(rows) + 0.5) / rows
    lengths = np.ceil(np.log1p(-quantiles) / math.log1p(-ends))
    return Rows(prompts, rng.permutation(np.minimum(lengths, task.new_tokens)), task.group)


@dataclass(frozen=True)
class Engine:
    """Costs of one engine replica."""

    launch_s: float  # of a step, without any sequence
    weights_s: float  # reading all weights once
    matrices_s: float  # matrix products of one token
    row_s: float  # of a sequence in a step
    context_s: float  # reading keys and values of one token of context
    capacity: float = UNLIMITED  # tokens of the key-value cache


@dataclass
class _Sequence:
    """A row in the engine: tokens in the cache, and those that its answer still needs."""

    context: float
    missing: float


def decode_seconds(rows: Rows, engine: Engine) -> float:
    """Seconds until every row has its answer; all arrive at once.

    As in vLLM, a row is admitted if the cache holds its tokens and the next block of every running row. If the cache
    is full, the row admitted last waits again, and computes its tokens anew when it is admitted.
    """
    waiting = [_Sequence(*each) for each in zip(rows.prompts.tolist(), rows.answers.tolist(), strict=True)][::-1]
    running: list[_Sequence] = []
    context, seconds = 0.0, float(rows.prompts[:: rows.group].sum()) * engine.matrices_s
    while waiting or running:
        while waiting and (
            not running or context + waiting[-1].context + BLOCK * (len(running) + 1) <= engine.capacity
        ):
            running.append(waiting.pop())
            context += running[-1].context
        count = len(running)
        until_full = max(0.0, (engine.capacity - context) // count)
        if until_full == 0 and count > 1:
            waiting.append(running.pop())
            context -= waiting[-1].context
            seconds += waiting[-1].context * engine.matrices_s
            continue
        steps = min(min(each.missing for each in running), max(until_full, 1.0))
        each_s = engine.launch_s + max(engine.weights_s, count * engine.matrices_s) + count * engine.row_s
        seconds += steps * each_s + engine.context_s * (context * steps + count * steps * (steps - 1) / 2)
        for each in running:
            each.context, each.missing = each.context + steps, each.missing - steps
        running = [each for each in running if each.missing > 0]
        context = sum(each.context for each in running)
    return seconds


def training_flops(shape: Shape, rows: Rows, *, adapter: bool = False, checkpointing: bool = False) -> float:
    """Operations of forward and backward, if a group computes its prompt once."""
    each = FROZEN if adapter else FORWARD_BACKWARD
    more = (each + RECOMPUTED_FORWARD) / each if checkpointing else 1.0
    prompts, answers = rows.prompts, rows.answers
    once = prompts[:: rows.group]
    nodes = float(once.sum() + answers.sum())
    pairs = float((once * (once + 1) / 2).sum() + (answers * prompts + answers * (answers + 1) / 2).sum())
    attention = 2 * FORWARD_BACKWARD * shape.attention_width * shape.layers * pairs
    return more * (each * (shape.layer_weights * nodes + shape.head_weights * float(answers.sum())) + attention)


@dataclass(frozen=True)
class Affine:
    """``floor + slope * gigabytes`` seconds."""

    floor: float
    slope: float

    def __call__(self, size: float) -> float:
        return self.floor + self.slope * size / 1e9

    @classmethod
    def through(cls, first: tuple[float, float], second: tuple[float, float]) -> "Affine":
        """The line through two measurements of (bytes, seconds)."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return cls(first[1] - slope * first[0], slope * 1e9)


@dataclass(frozen=True)
class Sharing:
    """Speed of both sides, as a part of their speed alone, while engine and trainer work on one GPU."""

    rollouts: float
    training: float


@dataclass(frozen=True)
class Decoding:
    """Constants of decoding."""

    launch_s_a_layer: float
    row_s: float = 0.0
    adapter_launch_s: float = 0.0  # more of each step


@dataclass(frozen=True)
class Constants:
    """What was measured; ``calibration.calibrate`` says where."""

    decoding: Decoding
    mfu_inverse: tuple[float, float]  # 1 / MFU = first + second * Shape.elementwise
    adapter_share: float  # MFU with an adapter beside the MFU of a full training
    two_rank_share: float  # speed of two ranks beside twice one rank
    judge_s: float  # of a row
    publish: Affine  # by bytes of the published weights
    deploy: Affine
    rest: Affine
    turns_s: float  # more, if engine and trainer take turns on the GPU's memory
    save_stall_s: float  # a round, if the trainer state is written beside it
    mps: Sharing
    time_slices: Sharing


@dataclass(frozen=True)
class Setup:
    """What runs a round."""

    shape: str
    gpu: str
    ranks: int = 1
    adapter: bool = False
    turns: bool = False
    checkpointing: bool = False
    cache_tokens: float = UNLIMITED
    saves: float = 0.0  # of the trainer state, a round
    overlap: str = ""  # sync_offset 1: "apart" on two GPUs; "mps" or "time_slices" on one


@dataclass(frozen=True)
class Prediction:
    """Seconds of one round and of its parts."""

    rollouts: float
    judging: float
    training: float  # without publishing
    publishing: float
    other: float
    round: float


def engine_of(setup: Setup, constants: Decoding) -> Engine:
    """The costs of a replica on one GPU."""
    shape, gpu = Shape.of(setup.shape), GPUS[setup.gpu]
    weights = shape.layer_weights + shape.head_weights
    return Engine(
        launch_s=constants.launch_s_a_layer * shape.layers + constants.adapter_launch_s * setup.adapter,
        weights_s=BYTES * weights / gpu.bandwidth,
        matrices_s=2 * weights / gpu.flops,
        row_s=constants.row_s,
        context_s=shape.kv_bytes / gpu.bandwidth,
        capacity=setup.cache_tokens,
    )


def training_seconds(setup: Setup, rows: Rows, constants: Constants) -> float:
    """Seconds of forward, backward and optimiser."""
    shape = Shape.of(setup.shape)
    flops = training_flops(shape, rows, adapter=setup.adapter, checkpointing=setup.checkpointing)
    inverse = constants.mfu_inverse[0] + constants.mfu_inverse[1] * shape.elementwise
    speed = setup.ranks * (constants.two_rank_share if setup.ranks > 1 else 1.0)
    speed *= constants.adapter_share if setup.adapter else 1.0
    return flops * inverse / (GPUS[setup.gpu].flops * speed)


def predict(setup: Setup, rows: Rows, constants: Constants) -> Prediction:
    """Seconds of a steady round."""
    published = 0 if setup.adapter else BYTES * Shape.of(setup.shape).weights
    rollouts = decode_seconds(rows, engine_of(setup, constants.decoding))
    judging = constants.judge_s * len(rows.answers)
    training = training_seconds(setup, rows, constants)
    publishing = constants.publish(published)
    other = constants.deploy(published) + constants.rest(published)
    other += constants.turns_s * setup.turns + constants.save_stall_s * setup.saves
    explore, train = rollouts + judging, training + publishing
    both = explore + train
    if setup.overlap == "apart":
        both = max(explore, train)
    elif setup.overlap:
        both = beside(explore, train, getattr(constants, setup.overlap))
    return Prediction(rollouts, judging, training, publishing, other, both + other)


def beside(explore: float, train: float, sharing: Sharing) -> float:
    """Seconds of both on one GPU at the same time; who is left alone goes on at full speed."""
    first = min(explore / sharing.rollouts, train / sharing.training)
    return first + max(explore - first * sharing.rollouts, train - first * sharing.training)
