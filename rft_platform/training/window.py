"""One rank's share of an optimiser step: which rows are computed, what the objective reads of them, what counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft_platform.algorithms.aggregation import Aggregation
from rft_platform.algorithms.objective import Objective
from rft_platform.errors import UserError
from rft_platform.training.packing import Pack, pack
from rft_platform.training.protocol import AlgorithmSpec
from rft_platform.training.samples import Sample

#: Fields of ``TokenBatch`` and where a sample has them.
_COLUMNS = {
    "behaviour_logp": "behaviour_logprobs",
    "old_logp": "old_logprobs",
    "reference_logp": "reference_logprobs",
}


@dataclass(slots=True)
class Window:
    """The rows of one step that this rank computes, packed, with their columns."""

    packs: list[Pack]
    objective: Objective
    aggregation: Aggregation
    counts: dict[str, float]  # to be summed over ranks
    weight: np.ndarray  # float64 by sample: the weight of each of its tokens
    columns: dict[str, np.ndarray]  # fields of TokenBatch, float32 over the samples' concatenated tokens

    @classmethod
    def of(cls, samples: Sequence[Sample], algorithm: AlgorithmSpec, max_tokens: int, skip: bool) -> "Window":
        """Pack ``samples``; with ``skip`` those that cannot have a gradient are counted but not computed."""
        objective = build_objective(algorithm)
        aggregation = Aggregation(algorithm.loss_agg_mode, algorithm.loss_norm_length)
        samples = [s for s in samples if s.loss_mask.any()]
        run = [s for s in samples if np.any(s.advantage)] if skip and objective.zero_advantage_is_inert else samples
        columns = _columns(run, objective)
        packs = pack(run, max_tokens)
        tokens = np.array([np.count_nonzero(s.loss_mask) for s in run], np.int64)
        counts = {
            "tokens": sum(np.count_nonzero(s.loss_mask) for s in samples),
            "rows": len(samples),
            "rows_zero_advantage": sum(not np.any(s.advantage) for s in samples),
            "advantage": sum(float(np.mean(s.advantage)) for s in samples),
            "tokens_evaluated": tokens.sum(),
            "tokens_unpacked": sum(len(s.token_ids) for s in samples),
            "tokens_computed": sum(len(p.input_ids) for p in packs),
            "packs": len(packs),
        }
        weight = aggregation.weights(tokens) * np.array([s.weight for s in run])
        return cls(packs, objective, aggregation, counts, weight, columns)


def build_objective(algorithm: AlgorithmSpec) -> Objective:
    """The per-token objective of a specification; UserError for names and options that do not exist."""
    return Objective.build(
        algorithm.policy_loss,
        algorithm.policy_loss_args,
        beta=algorithm.beta,
        kl=algorithm.kl_loss,
        entropy_coef=algorithm.entropy_coef,
        token_mask=algorithm.token_mask,
        row_mask=algorithm.row_mask,
        correction=algorithm.correction,
        weight_cap=algorithm.weight_cap,
    )


def _columns(samples: Sequence[Sample], objective: Objective) -> dict[str, np.ndarray]:
    """What the objective reads of the samples' tokens; the same names on all ranks, whatever rows they have."""
    values: dict[str, list[Any]] = {"advantage": [np.broadcast_to(s.advantage, len(s.token_ids)) for s in samples]}
    for name, attribute in _COLUMNS.items():
        if _needed(name, objective):
            values[name] = [_present(sample, attribute) for sample in samples]
    return {name: np.concatenate([np.zeros(0), *column]).astype(np.float32) for name, column in values.items()}


def _needed(name: str, objective: Objective) -> bool:
    if name == "reference_logp":
        return objective.needs_reference
    if name == "old_logp":
        return objective.policy_loss.policy_gradient and objective.correction == "decoupled"
    return objective.policy_loss.policy_gradient


def _present(sample: Sample, attribute: str) -> np.ndarray:
    values: np.ndarray | None = getattr(sample, attribute)
    if values is None:
        what = attribute.replace("_logprobs", " log-probs")
        raise UserError(f"row {sample.row_id} has no {what}: {_WHY[attribute]}")
    return values


_WHY = {
    "behaviour_logprobs": "a policy-gradient loss needs them; train on rollouts, or use the loss 'sft'",
    "old_logprobs": "the decoupled correction needs them; they are computed before a training's first step",
    "reference_logprobs": "a KL to the reference model needs them, and so does the loss 'dpo'; name a reference",
}
