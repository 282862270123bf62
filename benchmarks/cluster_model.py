"""A cost model of a round on many GPUs: engines on some, the trainer on the others, exploration one round ahead.

It adds to ``round_model.py`` what one or two GPUs do not show: processes that call the engine, weights that many
engines read, gradients between nodes, and the longest answers of many replicas. What was not measured here is a field
of ``Assumptions``. ``improve`` finds the largest wait of a round and applies the change that removes it, again and
again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from calibration import EIGHT_B_ADAPTER, calibrate, result
from round_gpu import TASKS
from round_model import (
    BYTES,
    GPUS,
    STATE_BYTES,
    Rows,
    Setup,
    Shape,
    decode_seconds,
    engine_of,
    rows_of,
    training_seconds,
)

CALIBRATION_SHARE = 0.7  # of the GPU's memory, of the engine whose cache was measured (round_gpu_4b.json, "chosen")


@dataclass(frozen=True)
class Assumptions:
    """What was not measured here, and prices."""

    gpus_a_node: int = 8
    network: float = 50e9  # bytes a second of a GPU between nodes: InfiniBand NDR, 400 Gb/s (NVIDIA's DGX H100 guide)
    links: float = 450e9  # the same inside a node, in one direction: NVLink 4, 900 GB/s both ways (H100's data sheet)
    shared_read: float = 10e9  # bytes a second that all readers of the shared file system get together
    engine_share: float = 0.9  # of the memory of a GPU that has nothing but an engine
    trainer_memory: float = 60e9  # bytes of a GPU for the weights, gradients and moments; the rest is activations
    pack_tokens: int = 8192  # of a forward and backward pass of one rank
    dollars_a_gpu_hour: float = 3.0
    dollars_a_gpu_hour_source: str = (
        "H100 SXM on demand at specialised clouds, 2.50 to 3.50 dollars, May 2026: "
        "https://www.mercatus-ai.com/blog/cloud-gpu-pricing"
    )
    dollars_a_gb_month: float = 0.023
    dollars_a_gb_month_source: str = (
        "S3 Standard, us-east-1, first 50 TB, https://aws.amazon.com/s3/pricing/; as in earlier years, not read in 2026"
    )


@dataclass(frozen=True)
class Workload:
    """What a round explores. Rows grow with the engines (``rows`` None), or are a fixed number."""

    name: str
    task: str
    shape: str = "8b"
    calls: int = 1  # of the model, a row
    rows_an_engine: int = 512
    rows: int | None = None


#: Changes, by the wait that they remove.
REMEDIES = {
    "calls of one process": "worker processes on every node (two a GPU) make the calls and judge",
    "judging in one process": "worker processes on every node (two a GPU) make the calls and judge",
    "reading weights": "weights go from GPU to GPU; the checkpoint is written beside the next round",
    "publishing weights": "weights go from GPU to GPU; the checkpoint is written beside the next round",
    "gradients between nodes": "weights sharded inside a node, gradients summed between nodes",
    "longest answers": "unfinished answers continue in the next round (bounded staleness)",
}


@dataclass(frozen=True)
class Plan:
    """How many GPUs serve, and which changes are made."""

    gpus: int
    engines: int
    remedies: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ClusterRound:
    """Seconds of a round, and the waits in it that are neither decoding at full batches nor training."""

    plan: Plan
    rows: int
    decoding: float
    training: float
    waits: dict[str, float]
    round: float

    @property
    def efficiency(self) -> float:
        """Share of all GPU seconds in which engines decode full batches or ranks compute gradients."""
        engines = self.plan.engines / self.plan.gpus
        return (engines * self.decoding + (1 - engines) * self.training) / self.round


def cache_tokens(shape: str, assumed: Assumptions) -> float:
    """Tokens of the cache of an engine alone on its H100, from the measured cache of 8B."""
    gpu, measured = GPUS["H100"], float(result("round_gpu_4b")[EIGHT_B_ADAPTER]["key_value_cache_tokens"])
    eight = Shape.of("8b")
    room = measured * eight.kv_bytes + BYTES * eight.weights
    room += (assumed.engine_share - CALIBRATION_SHARE) * gpu.memory
    own = Shape.of(shape)
    return (room - BYTES * own.weights) / own.kv_bytes


@cache
def explored(task: str, rows: int, replicas: int) -> tuple[Rows, Rows]:
    """All rows of a round, and those of the replica with the most tokens."""
    base = TASKS[task]
    found = rows_of(replace(base, tasks=max(replicas, math.ceil(rows / base.group))))
    return found, max(found.dealt(replicas), key=lambda each: float(each.answers.sum()))


@cache
def decoding(task: str, shape: str, rows: int, replicas: int, assumed: Assumptions) -> tuple[float, float]:
    """Seconds of the slowest replica; and at full batches, as if answers never ran out."""
    all_rows, slowest = explored(task, rows, replicas)
    engine = engine_of(Setup(shape, "H100", cache_tokens=cache_tokens(shape, assumed)), calibrate().decoding)
    batch = min(len(slowest.answers), 512)
    mean = Rows(np.full(batch, all_rows.prompts.mean()), np.full(batch, float(round(all_rows.answers.mean()))), 8)
    full = decode_seconds(mean, engine) * len(all_rows.answers) / (batch * replicas)
    seconds = decode_seconds(slowest, engine)
    return seconds, min(full, seconds)


def exposed_communication(shape: Shape, tokens: float, computing: float, plan: Plan, assumed: Assumptions) -> float:
    """Seconds of the trainer's communication beyond its computing, with which it overlaps.

    Sharded over all ranks, each pack gathers the weights twice and scatters the gradients once. Sharded inside a node,
    it does so over the node's links, and a step sums the gradients of each shard between nodes once.
    """
    ranks = plan.gpus - plan.engines
    if ranks == 1:
        return 0.0
    inside = ranks <= assumed.gpus_a_node
    hybrid = REMEDIES["gradients between nodes"] in plan.remedies and not inside
    packs = math.ceil(tokens / (ranks * assumed.pack_tokens))
    weights = BYTES * shape.layer_weights
    speed = assumed.links if inside or hybrid else assumed.network
    seconds = packs * 3 * weights / speed
    if hybrid:
        seconds += 2 * weights / assumed.gpus_a_node / assumed.network
    return max(0.0, seconds - computing)


def simulate(plan: Plan, work: Workload, assumed: Assumptions) -> ClusterRound:
    """Seconds of a steady round of ``work``."""
    constants, shape, ranks = calibrate(), Shape.of(work.shape), plan.gpus - plan.engines
    rows = work.rows or work.rows_an_engine * plan.engines
    all_rows, _ = explored(work.task, rows, plan.engines)
    slowest, full = decoding(work.task, work.shape, rows, plan.engines, assumed)
    processes = 2 * plan.gpus if REMEDIES["calls of one process"] in plan.remedies else 1
    calling = work.calls * rows * _call_s() / processes
    judging = constants.judge_s * rows / processes
    continued = REMEDIES["longest answers"] in plan.remedies
    decoded = full if continued else slowest
    explore = max(decoded, calling) + judging

    one = training_seconds(Setup(work.shape, "H100"), all_rows, constants)
    training = one / (ranks * (constants.two_rank_share if ranks > 1 else 1.0))
    nodes_tokens = float(all_rows.prompts[:: all_rows.group].sum() + all_rows.answers.sum())
    gradients = exposed_communication(shape, nodes_tokens, training, plan, assumed)
    published = BYTES * shape.weights
    direct = REMEDIES["reading weights"] in plan.remedies
    publishing = 0.0 if direct else constants.publish(published) + constants.rest.slope * published / 1e9
    reading = 2 * published / assumed.network if direct else constants.deploy.slope * published / 1e9
    if not direct:
        reading += plan.engines * published / assumed.shared_read
    train = training + gradients + publishing
    fixed = constants.deploy.floor + constants.rest.floor + _append_s(rows)
    waits = {
        "calls of one process": max(0.0, calling - decoded),
        "judging in one process": judging,
        "longest answers": decoded - full,
        "gradients between nodes": gradients,
        "publishing weights": publishing,
        "reading weights": reading,
        "fixed costs and storing rows": fixed,
    }
    return ClusterRound(plan, rows, full, training, waits, max(explore, train) + reading + fixed)


@cache
def _call_s() -> float:
    """Processor seconds of a model call with its record, in the process of the agent."""
    found = result("recording_overhead_h200")["vllm"]["sides"]["recording"]["cpu_ms_a_call"]
    return float(found) / 1e3


def _append_s(rows: int) -> float:
    stored = result("store_at_size")["as written"]
    return float(
        rows / 1e4 * (stored["append 10,000 rows"]["median_s"] + stored["training read of a round"]["median_s"])
    )


def best(gpus: int, work: Workload, assumed: Assumptions, remedies: frozenset[str]) -> ClusterRound:
    """The split of the GPUs between engines and trainer that makes the most rows a second."""
    least = math.ceil(STATE_BYTES * Shape.of(work.shape).weights / assumed.trainer_memory)
    counts = {max(1, round(gpus * eighths / 8)) for eighths in range(1, 8)}
    plans = [Plan(gpus, engines, remedies) for engines in sorted(counts) if gpus - engines >= least]
    return max((simulate(plan, work, assumed) for plan in plans), key=lambda each: each.rows / each.round)


def improve(gpus: int, work: Workload, assumed: Assumptions) -> Iterator[tuple[ClusterRound, str]]:
    """Rounds, each with the change of its largest wait that is made next; the last one without."""
    remedies: frozenset[str] = frozenset()
    while True:
        found = best(gpus, work, assumed, remedies)
        for wait, _ in sorted(found.waits.items(), key=lambda each: -each[1]):
            remedy = REMEDIES.get(wait, "")
            if not remedy or remedy in remedies:
                continue
            better = best(gpus, work, assumed, remedies | {remedy})
            if better.rows / better.round > 1.02 * found.rows / found.round:
                break
        else:
            yield found, ""
            return
        yield found, wait
        remedies |= {remedy}
