"""Gradients of one optimiser step over packed rows: log-probs, loss and backward pass, pack by pack.

``StepShare`` is one rank's share of a step: the rows to compute, the columns of the objective, and the counts. A loss
with ``selects`` gives some tokens another loss. Which tokens these are depends on all tokens of the step, so they are
selected from all rows, on all ranks, before the step is packed.
"""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rft_platform.algorithms.aggregation import Aggregation
from rft_platform.algorithms.common.ratio import effective_sample_share
from rft_platform.algorithms.losses.registry import StepTokens, TokenBatch
from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.common.errors import UserError
from rft_platform.training.data.samples import Sample
from rft_platform.training.distributed import Reduce, one_rank
from rft_platform.training.loop.distillation import distillation_loss
from rft_platform.training.loop.kl_baseline import set_kl_baseline
from rft_platform.training.loop.step_metrics import DeviceClock
from rft_platform.training.packed.attention import has_tiles, to_device
from rft_platform.training.packed.flops import TrainingCost, Work, sharing_pays
from rft_platform.training.packed.lm_head import PackTensors
from rft_platform.training.packed.packed_policy import PackedPolicy, idle_pack, prepare_backward
from rft_platform.training.packed.packing import Pack, StaticLengths, pack

#: Fields of ``Sample`` that become fields of ``TokenBatch`` if the objective reads them -> which objectives need them.
_LOGPROBS = {
    "rollout_logprobs": "a policy-gradient loss needs them; train on rollouts, or use the loss 'sft'",
    "old_logprobs": "the decoupled correction needs them; they are computed before a training's first step",
    "reference_logprobs": "a KL to the reference model needs them, as do losses such as 'dpo'; set a reference model",
}


@dataclass(slots=True)
class StepShare:
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
    ) -> "StepShare":
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


def select_tokens(samples: Sequence[Sample], objective: Objective, reduce: Reduce) -> None:
    """Set ``selected`` of every sample, if the loss selects tokens. Every rank must make the same call."""
    selects = objective.policy_loss.selects
    if selects is None:
        return
    decoupled = objective.spec.correction == "decoupled"
    reads_change = objective.policy_loss.entropy_change is not None
    logp, advantage, draw, change = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    for sample in samples:
        mask = sample.loss_mask
        values = sample.old_logprobs if decoupled else sample.rollout_logprobs
        logp.append(np.zeros(mask.sum()) if values is None else values[mask])  # the step refuses a row without them
        advantage.append(np.broadcast_to(sample.advantage, len(mask))[mask])
        draw.append(np.random.default_rng(zlib.crc32(sample.row_id.encode())).random(mask.sum()))
        if reads_change:
            assert sample.entropy_change is not None, "the training computes it before its first step"
            change.append(sample.entropy_change[mask])

    def total(values: np.ndarray) -> np.ndarray:
        return reduce(torch.from_numpy(values), "sum").numpy()

    joined = [np.concatenate(column).astype(np.float64) for column in (logp, advantage, draw, change)]
    chosen = selects(StepTokens(joined[0], joined[1], joined[2], total, joined[3]))
    ends = np.cumsum([np.count_nonzero(sample.loss_mask) for sample in samples])
    for sample, part in zip(samples, np.split(chosen, ends[:-1]), strict=False):
        sample.selected = np.zeros(len(sample.token_ids), np.float32)
        sample.selected[sample.loss_mask] = part


def accumulate_gradients(
    policy: PackedPolicy,
    samples: Sequence[Sample],
    algorithm: AlgorithmSpec,
    *,
    max_tokens_per_pack: int,
    reduce: Reduce | None = None,
    world_size: int = 1,
    skip_zero_advantage: bool = True,
    share_prefixes: bool | None = None,
    clock: DeviceClock | None = None,
    teacher: PackedPolicy | None = None,
) -> dict[str, float]:
    """Add the gradient of one optimiser step's loss to ``policy``'s parameters and return the step's metrics.

    ``samples`` are this rank's share of the whole step. Forward and backward run over packs of at most
    ``max_tokens_per_pack`` computed tokens. The loss is divided once, by counts over all ranks and all packs of the
    optimiser step. FSDP averages gradients over ranks, so the loss is multiplied by ``world_size``; without FSDP leave
    ``reduce`` and ``world_size`` at their defaults. Every rank runs the same number of packs and returns the same
    metrics. The caller zeroes the gradients before the call, and clips the gradients and updates the weights after it.
    ``metrics["packs"] == 0`` means that no row had a gradient and no backward pass ran.

    With ``skip_zero_advantage``, rows with an advantage of exactly 0 are left out of forward and backward if they have
    no gradient (no KL, no entropy bonus). The normaliser still counts them, so the gradient is the same. Metrics that
    need the policy's log-probs (entropy, mismatch, clip fractions) are then means over the remaining rows.

    ``share_prefixes`` True computes shared tokens once, False computes each row separately, None chooses the option
    with fewer operations. ``clock`` times packing, forward and backward. Distillation losses use ``teacher``.
    """
    reduce, clock, objective = reduce or one_rank, clock or DeviceClock(policy.device), Objective.build(algorithm)
    with clock.time("forward"):
        set_kl_baseline(policy, samples, objective, reduce, max_tokens_per_pack)
    with clock.time("pack", on_host=True):
        select_tokens(samples, objective, reduce)
        cost = TrainingCost.of(policy)
        share = _step_share(policy, samples, algorithm, max_tokens_per_pack, skip_zero_advantage, share_prefixes, cost)
        idle = idle_pack(policy, max_tokens_per_pack)
        counts = share.counts | _operations(share.packs, cost)
    largest = reduce(torch.tensor([len(share.packs), counts["flops"]], dtype=torch.float64), "max").tolist()
    totals = reduce(torch.tensor(list(counts.values()), dtype=torch.float64), "sum").tolist()
    counts = dict(zip(counts, totals, strict=True)) | {"flops_if_balanced": largest[1] * world_size}
    passes = int(largest[0])
    if not passes:
        return _count_metrics(counts, share.objective)
    weight = share.token_weight(counts, world_size)
    sums: dict[str, Tensor] = {}
    for index in range(passes):
        with clock.time("pack", on_host=True):
            part = _PartLoss(share, index, weight, policy.device, idle)
            batch = PackTensors.of(part.pack, policy.device, policy.compute_dtype)
        prepare_backward(policy, last=index == passes - 1)
        with clock.time("forward"):
            loss = _loss_of(policy, teacher, batch, part, share.objective)
        with clock.time("backward"):
            loss.backward()
        part.add("loss", loss.detach() / world_size)
        for name, value in part.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    totals = reduce(torch.stack(list(sums.values())).cpu(), "sum").tolist()
    return _count_metrics(counts, share.objective) | _policy_metrics(dict(zip(sums, totals, strict=True)), counts)


def _loss_of(
    policy: PackedPolicy, teacher: PackedPolicy | None, batch: PackTensors, part: "_PartLoss", objective: Objective
) -> Tensor:
    """The loss of one pack (0-dim), by the forward pass of the policy and, for distillation, of the teacher."""
    if objective.policy_loss.teacher:
        return distillation_loss(policy, teacher, batch, part, objective.policy_loss)
    loss: Tensor = policy(batch, part, objective.whole_rows)
    return loss


class _PartLoss:
    """The loss of one pack's tokens, called chunk by chunk; ``sums`` collects the metrics.

    An index beyond this rank's last pack gives an idle pack with weight 0: under FSDP all ranks must run the same
    number of passes.
    """

    def __init__(self, share: StepShare, index: int, weight: np.ndarray, device: torch.device, idle_pack: Pack) -> None:
        idle = index >= len(share.packs)
        self.pack = idle_pack if idle else share.packs[index]
        self.sums: dict[str, Tensor] = {}
        self._objective = share.objective
        self._counted = 0.0 if idle else 1.0

        def take(column: np.ndarray, index: np.ndarray) -> Tensor:
            values = np.zeros(len(index)) if idle else column[index]
            return to_device(values.astype(np.float32), device)

        self._row = to_device(self.pack.token_row, device)
        self._weight = take(weight, self.pack.rows[self.pack.token_row])
        self._row_group = None
        if share.objective.policy_loss.whole_groups:
            group = np.zeros(1, np.int64) if idle else share.group[self.pack.rows]
            self._row_group = to_device(np.unique(group, return_inverse=True)[1], device)
        self._columns = {name: take(column, self.pack.token_source) for name, column in share.columns.items()}

    def __call__(self, logp: Tensor, entropy: Tensor, tokens: slice, divergence: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the losses of some of the pack's tokens."""
        columns = {name: column[tokens] for name, column in self._columns.items()}
        batch = TokenBatch(
            logp=logp,
            entropy=entropy,
            row=self._row[tokens],
            rows=len(self.pack.rows),
            row_group=self._row_group,
            divergence=divergence,
            **columns,
        )
        out = self._objective(batch)
        for name, value in out.metrics.items():
            self.add(name, value)
        return torch.dot(out.loss, self._weight[tokens])

    def add(self, name: str, value: Tensor) -> None:
        """Add ``value`` to the sum ``name``. An idle pack adds 0, so that all ranks have the same names."""
        value = value.double() * self._counted
        self.sums[name] = self.sums[name] + value if name in self.sums else value


def _step_share(
    policy: PackedPolicy,
    samples: Sequence[Sample],
    algorithm: AlgorithmSpec,
    max_tokens: int,
    skip: bool,
    share_prefixes: bool | None,
    cost: TrainingCost,
) -> StepShare:
    """Build this rank's share. If ``share_prefixes`` is None, prefixes are shared if that saves enough operations."""
    static, tile_cost = policy.static, cost.tile if has_tiles(policy.device, policy.compute_dtype) else 0.0
    share = StepShare.of(samples, algorithm, max_tokens, skip, share_prefixes is not False, static, tile_cost)
    if share_prefixes is None and not sharing_pays(cost, Work.of_packs(share.packs), Work.of_rows(share.packs)):
        return StepShare.of(samples, algorithm, max_tokens, skip, False, static)
    return share


def _operations(packs: Sequence[Pack], cost: TrainingCost) -> dict[str, float]:
    """Floating-point operations of the packs, and of the same rows computed separately."""
    return {"flops": cost.flops(Work.of_packs(packs)), "flops_unpacked": cost.flops(Work.of_rows(packs))}


_COUNTS = ("tokens", "rows", "tokens_computed", "tokens_unpacked", "packs", "flops")


def _count_metrics(counts: dict[str, float], objective: Objective) -> dict[str, float]:
    """Metrics that need no forward pass. Advantage metrics are omitted for losses that do not use advantages."""
    rows, run = max(counts["rows"], 1), max(counts["tokens_unpacked"], 1)
    advantages = {
        "advantage_mean": counts["advantage"] / rows,
        "zero_advantage_share": counts["rows_zero_advantage"] / rows,
    }
    return {
        "loss": 0.0,
        **(advantages if objective.policy_loss.policy_gradient else {}),
        "computed_share": counts["tokens_computed"] / run,
        "padding_share": counts["tokens_padding"] / max(counts["tokens_computed"] + counts["tokens_padding"], 1),
        "flops_share": counts["flops"] / counts["flops_unpacked"] if counts["flops_unpacked"] else 1.0,
        "rank_balance": counts["flops"] / counts["flops_if_balanced"] if counts["flops_if_balanced"] else 1.0,
        **{name: counts[name] for name in _COUNTS},
    }


def _policy_metrics(sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    """Turn sums over all ranks into means; ``loss`` is already the step's loss and is not divided.

    Means are over the evaluated tokens, except ``pair_...`` (over pairs, or over their chosen or rejected rows) and
    ``expert_...`` (over expert tokens).
    """
    loss, squared = sums.pop("loss"), sums.pop("ratio_squared", 0.0)
    tokens = counts["tokens_evaluated"]
    over = {
        "pair": sums.pop("pairs", 0.0),
        "pair_reward_chosen": max(sums.pop("pairs_chosen", 0.0), 1),  # rows without a partner may all be of one kind
        "pair_reward_rejected": max(sums.pop("pairs_rejected", 0.0), 1),
        "expert": max(counts["expert_tokens"], 1),
    }
    metrics = {name: value / over.get(name, over.get(name.partition("_")[0], tokens)) for name, value in sums.items()}
    if "ratio" in sums:
        metrics["ess"] = effective_sample_share(sums["ratio"], squared, tokens)
    return {"loss": loss} | metrics
