"""Floating-point operations of a training step, and the peak throughput of a device, to compute the MFU.

Operations follow from the model's formulas, without padding and recomputation.

Per token, a matrix of W weights costs 2 W forward, 2 W for the gradient with respect to its input and, if it is
trained, 2 W for the gradient with respect to its weights. Per query-key pair and layer, attention costs 4 width (heads
x head size) forward and twice that backward (Narayanan et al., arXiv 2104.04473, without their recomputation). The LM
head runs only where a token is predicted. Norms, rotations and activations are omitted: a few per cent.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rft_platform.training.data.samples import Sample
from rft_platform.training.packed.packed_policy import PackedPolicy
from rft_platform.training.packed.packing import TILE, Pack, prefix_lengths

FORWARD, BY_INPUT, BY_WEIGHT = 2, 2, 2  # per weight and token: one multiplication and one addition
#: Tree attention on an H200 reaches this part of the throughput of the other matrix products (12 nodes a tile at 0.6
#: billion parameters), as 1 / TILE_SLOWDOWN.
TILE_SLOWDOWN = 2.8


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work of a model's pass over some rows."""

    nodes: float  # input tokens
    pairs: float  # (query, key) pairs of attention: each token with itself and its predecessors
    heads: float  # next-token distributions

    def __add__(self, other: "Work") -> "Work":
        return Work(self.nodes + other.nodes, self.pairs + other.pairs, self.heads + other.heads)

    @classmethod
    def of_packs(cls, packs: Sequence[Pack]) -> "Work":
        """Work of packs: each shared token counts once."""
        works = (cls(len(p.input_ids), float((p.position_ids + 1).sum()), len(p.head_node)) for p in packs)
        return sum(works, NO_WORK)

    @classmethod
    def of_rows(cls, packs: Sequence[Pack]) -> "Work":
        """Work of the same rows, each computed separately."""
        lengths = np.concatenate([np.zeros(0), *(np.diff(p.path_start) for p in packs)])
        pairs = float((lengths * (lengths + 1) / 2).sum())
        return cls(float(lengths.sum()), pairs, float(sum(len(p.token_source) for p in packs)))


NO_WORK = Work(0, 0, 0)


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Floating-point operations of forward and backward per node, per pair and per head."""

    node: float
    pair: float
    head: float

    @classmethod
    def of(cls, policy: PackedPolicy) -> "TrainingCost":
        """Compute the costs from the model's shape. Frozen weights (below an adapter) need no gradient."""
        config = policy.causal.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width *= config.num_attention_heads
        active = _active_experts(config)
        node = sum(
            parameter.numel() * (active if parameter.ndim > 2 else 1.0) * _each(parameter)
            for parameter in policy.layers.parameters()
            if parameter.ndim > 1
        )
        weight = policy.causal.get_output_embeddings().weight
        pair = 2 * (FORWARD + BY_INPUT + BY_WEIGHT) * width * len(policy.layers)
        return cls(node, pair, weight.numel() * _each(weight))

    @property
    def tile(self) -> float:
        """Number of nodes whose computation takes as long as one tile of tree attention."""
        return TILE_SLOWDOWN * self.pair * TILE**2 / self.node

    def flops(self, work: Work) -> float:
        """Operations of ``work``."""
        return self.node * work.nodes + self.pair * work.pairs + self.head * work.heads


def added_flops(cost: TrainingCost, samples: Sequence[Sample]) -> np.ndarray:
    """Operations that each sample adds if shared prefixes are computed once, float64; they sum to those of the trie."""
    length, shared, heads = prefix_lengths(samples)
    own = length - shared
    return cost.node * own + cost.pair * (own * shared + own * (own + 1) / 2) + cost.head * heads


#: Rows stay separate if sharing prefixes saves less than this share of operations, because tree attention has costs
#: that these counts omit (masks or gathered keys).
LEAST_GAIN = 0.01


def sharing_pays(cost: TrainingCost, trees: Work, rows: Work) -> bool:
    """Whether ``trees``, which compute shared tokens once, save enough operations compared with separate ``rows``.

    If the rows share nothing, both packings are the same, and the answer is True.
    """
    return trees.nodes == rows.nodes or cost.flops(trees) <= (1 - LEAST_GAIN) * cost.flops(rows)


def _each(parameter: nn.Parameter) -> int:
    return FORWARD + BY_INPUT + (BY_WEIGHT if parameter.requires_grad else 0)


def _active_experts(config: object) -> float:
    """Share of the experts that process a token. Expert weights are stacked in tensors of three dimensions."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0


#: Part of the device name -> dense bfloat16 and float32 (without TF32) TFLOP/s, from the vendors' data sheets.
_DATA_SHEETS = {
    "B200": (2250.0, 75.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H800": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 31.2),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.0, 163.4),
}
_LARGEST = {"cpu": 512, "cuda": 8192}  # size of the matrices that are multiplied if the table lacks the device
_TRIES = 8


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of one device in ``dtype``: from its data sheet or, if the table lacks it, measured.

    A measurement is the best of a few matrix products. A CPU is always measured: once per process and number of
    threads, in about 50 ms.
    """
    if device.type == "cuda":
        known = _from_data_sheet(torch.cuda.get_device_name(device), dtype)
        if known is not None:
            return known
    return _measured(device, dtype, torch.get_num_threads())


def _from_data_sheet(name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of the GPU called ``name``; None if the table does not list it."""
    words = name.replace("-", " ")
    found = next((peaks for part, peaks in _DATA_SHEETS.items() if f" {part} " in f" {words} "), None)
    return None if found is None else 1e12 * found[dtype == torch.float32]


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype, _threads: int) -> float:
    side = _LARGEST.get(device.type, _LARGEST["cpu"])
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(_TRIES):
        _wait(device)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
