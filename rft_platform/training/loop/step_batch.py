"""One rank's share of an optimiser step: the rows to compute, the columns of the objective, and the counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft_platform.algorithms.aggregation import Aggregation
from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.common.errors import UserError
from rft_platform.training.data.samples import Sample
from rft_platform.training.packed.packing import Pack, StaticLengths, pack

#: Fields of ``Sample`` that become fields of ``TokenBatch`` if the objective reads them -> which objectives need them.
_LOGPROBS = {
    "rollout_logprobs": "a policy-gradient loss needs them; train on rollouts, or use the loss 'sft'",
    "old_logprobs": "the decoupled correction needs them; they are computed before a training's first step",
    "reference_logprobs": "a KL to the reference model needs them, as do losses such as 'dpo'; set a reference model",
}


@dataclass(slots=True)
class Window:
    """The rows of one step that this rank computes, packed, with their columns."""

    packs: list[Pack]
    objective: Objective
    aggregation: Aggregation
    counts: dict[str, float]  # counts of this rank; the caller sums them over ranks
    weight: np.ndarray  # float64 per sample: the weight of each of its tokens
    columns: dict[str, np.ndarray]  # fields of TokenBatch, float32 over the samples' concatenated tokens
    group: np.ndarray  # int64 per sample
    expert: np.ndarray  # bool per sample: a demonstration mixed into rollouts
    expert_weight: float | None  # share of the expert rows in the loss; None: they count like other rows

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        algorithm: AlgorithmSpec,
        max_tokens: int,
        skip: bool,
        share_prefixes: bool = True,
        static: StaticLengths | None = None,
        tile_cost: float = 0.0,
    ) -> "Window":
        """Pack ``samples``. With ``skip``, samples that cannot have a gradient are counted but not computed.

        The other parameters are those of ``pack``.
        """
        objective = Objective.build(algorithm)
        aggregation = Aggregation(algorithm.loss_agg_mode, algorithm.loss_norm_length)
        samples = [s for s in samples if s.loss_mask.any()]
        inert = skip and objective.zero_advantage_is_inert and not objective.policy_loss.whole_groups
        run = [s for s in samples if s.expert or np.any(s.advantage)] if inert else samples
        columns = _columns(run, objective, mixed=algorithm.expert_weight is not None)
        whole_groups = objective.policy_loss.whole_groups
        packs = pack(
            run,
            max_tokens,
            share_prefixes=share_prefixes,
            whole_groups=whole_groups,
            static=static,
            tile_cost=tile_cost,
        )
        tokens = np.array([np.count_nonzero(s.loss_mask) for s in run], np.int64)
        counts = {
            "tokens": sum(np.count_nonzero(s.loss_mask) for s in samples),
            "rows": len(samples),
            "expert_tokens": sum(np.count_nonzero(s.loss_mask) for s in samples if s.expert),
            "expert_rows": sum(s.expert for s in samples),
            "rows_zero_advantage": sum(not (s.expert or np.any(s.advantage)) for s in samples),
            "advantage": sum(float(np.mean(_trained_advantage(s))) for s in samples),
            "tokens_evaluated": tokens.sum(),
            "tokens_unpacked": sum(len(s.token_ids) for s in samples),
            "tokens_computed": sum(len(p.input_ids) for p in packs),
            "tokens_padding": sum(p.length - len(p.input_ids) for p in packs),
            "packs": len(packs),
        }
        weight = aggregation.weights(tokens) * np.array([s.weight for s in run])
        expert = np.array([s.expert for s in run], bool)
        return cls(
            packs, objective, aggregation, counts, weight, columns, _groups(run), expert, algorithm.expert_weight
        )

    def token_weight(self, counts: Mapping[str, float], world_size: int) -> np.ndarray:
        """Factor on the loss of each sample's tokens, float64 per sample. ``counts`` are summed over all ranks.

        With an ``expert_weight`` w, the loss is (1 - w) times the rollouts' loss plus w times the experts' loss, each
        normalised by its own count. No other code divides by these counts.
        """
        if self.expert_weight is None:
            return self.weight * (world_size / self.aggregation.normaliser(counts["tokens"], counts["rows"]))
        tokens, rows = counts["expert_tokens"], counts["expert_rows"]
        experts = max(self.aggregation.normaliser(tokens, rows), 1)
        others = max(self.aggregation.normaliser(counts["tokens"] - tokens, counts["rows"] - rows), 1)
        factor = np.where(self.expert, self.expert_weight / experts, (1 - self.expert_weight) / others)
        return self.weight * factor * world_size


def _trained_advantage(sample: Sample) -> float | np.ndarray:
    """The advantage of a row: one number, or the values of its trained tokens."""
    return sample.advantage[sample.loss_mask] if isinstance(sample.advantage, np.ndarray) else sample.advantage


def _columns(samples: Sequence[Sample], objective: Objective, *, mixed: bool) -> dict[str, np.ndarray]:
    """Columns that the objective reads. The names are the same on all ranks, whatever rows they have."""
    values: dict[str, list[Any]] = {"advantage": [np.broadcast_to(s.advantage, len(s.token_ids)) for s in samples]}
    for name in _LOGPROBS:
        if _needed(name, objective):
            values[name] = [_present(sample, name) for sample in samples]
    if objective.policy_loss.selects is not None:
        values["selected"] = [s.selected for s in samples]
    if objective.policy_loss.mismatched:
        values["kl_baseline"] = [s.kl_baseline for s in samples]
    if mixed:
        values["expert"] = [np.broadcast_to(float(s.expert), len(s.token_ids)) for s in samples]
    return {name: np.concatenate([np.zeros(0), *column]).astype(np.float32) for name, column in values.items()}


def _groups(samples: Sequence[Sample]) -> np.ndarray:
    """Group of each sample. A sample that occurs several times in a step gets a separate group for each occurrence."""
    seen: Counter[int] = Counter()
    group = np.array([s.group for s in samples], np.int64)
    repeat = np.zeros(len(samples), np.int64)
    for index, sample in enumerate(samples):
        repeat[index] = seen[id(sample)]
        seen[id(sample)] += 1
    return group + repeat * (group.max(initial=0) + 1)


def _needed(name: str, objective: Objective) -> bool:
    if name == "reference_logprobs":
        return objective.needs_reference
    if name == "old_logprobs":
        return objective.policy_loss.policy_gradient and objective.spec.correction == "decoupled"
    return objective.policy_loss.policy_gradient


def _present(sample: Sample, name: str) -> np.ndarray:
    values: np.ndarray | None = getattr(sample, name)
    if values is None and sample.expert and name == "rollout_logprobs":
        return np.zeros(
            len(sample.token_ids), np.float32
        )  # no rollout log-probs: the objective uses the current policy's
    if values is None:
        what = name.replace("_logprobs", " log-probs")
        raise UserError(f"row {sample.row_id} has no {what}: {_LOGPROBS[name]}")
    return values
