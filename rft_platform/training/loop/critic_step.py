"""The critic's part of an optimiser step: gradients, clipping, update."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rft_platform.algorithms.spec import CriticSpec
from rft_platform.algorithms.value_loss import explained_variance, value_loss
from rft_platform.common.errors import NonFiniteError, some
from rft_platform.training.data.samples import Sample
from rft_platform.training.distributed import Reduce, most, one_rank
from rft_platform.training.models.critic import Critic, PackedCritic
from rft_platform.training.models.optimizer import apply_step, clip_gradients
from rft_platform.training.packed.attention import to_device
from rft_platform.training.packed.lm_head import PackTensors
from rft_platform.training.packed.packed_policy import idle_pack, prepare_backward
from rft_platform.training.packed.packing import Pack, pack


def accumulate_value_gradients(
    critic: PackedCritic,
    samples: Sequence[Sample],
    value_clip: float,
    *,
    max_tokens_per_pack: int,
    reduce: Reduce | None = None,
    world_size: int = 1,
) -> dict[str, float]:
    """Add the gradient of a step's value loss, the mean over the tokens of all ranks, to ``critic``'s parameters.

    ``samples`` are this rank's share of the whole step, with ``old_values`` and ``returns``. Every rank runs the same
    number of packs and returns the same metrics. If no rank has a token, nothing is computed and the returned metrics
    are empty.
    """
    reduce = reduce or one_rank
    packs = pack(samples, max_tokens_per_pack, static=critic.static)
    count = torch.tensor([sum(np.count_nonzero(s.loss_mask) for s in samples)], dtype=torch.float64)
    tokens = float(reduce(count, "sum"))
    if not tokens:
        return {}
    scale = world_size / tokens
    old, returns = (_column(samples, name) for name in ("old_values", "returns"))
    sums: dict[str, Tensor] = {}
    passes = most(len(packs), reduce)
    for index in range(passes):
        prepare_backward(critic, last=index == passes - 1)
        counted = index < len(packs)
        part = packs[index] if counted else idle_pack(critic, max_tokens_per_pack)
        value = critic(PackTensors.of(part, critic.device, critic.compute_dtype))
        out = value_loss(
            value, *(_take(column, part, counted, critic.device) for column in (old, returns)), clip=value_clip
        )
        loss = out.loss.sum() * (scale if counted else 0.0)
        loss.backward()
        for name, part_sum in (out.metrics | {"value_loss": loss.detach() * tokens / world_size}).items():
            sums[name] = sums.get(name, torch.zeros(())) + part_sum.double().cpu() * counted
    totals = reduce(torch.stack(list(sums.values())), "sum").tolist()
    return _metrics(dict(zip(sums, totals, strict=True)), tokens)


def critic_alone(critic: Critic | None, spec: CriticSpec | None) -> bool:
    """Whether the next step trains the critic only and leaves the policy unchanged."""
    return critic is not None and spec is not None and critic.updates < spec.warmup_steps


def step_critic(
    critic: Critic,
    spec: CriticSpec,
    samples: Sequence[Sample],
    *,
    step: int,
    max_tokens_per_pack: int,
    reduce: Reduce,
    world_size: int,
) -> dict[str, float]:
    """Update the critic once, with this rank's ``samples``. Its learning rate depends on the critic's update count.

    Raises NonFiniteError on all ranks if loss or gradient are not finite; the message names the global ``step``.
    """
    metrics = accumulate_value_gradients(
        critic.model, samples, spec.value_clip,
        max_tokens_per_pack=max_tokens_per_pack, reduce=reduce, world_size=world_size,
    )  # fmt: skip
    if not metrics:
        return {}
    norm = clip_gradients(critic.model.parameters(), spec.optimizer.clip_grad)
    if not (np.isfinite(norm) and np.isfinite(metrics["value_loss"])):
        raise NonFiniteError(
            f"step {step + 1} was refused: the critic's value loss is {metrics['value_loss']}, its gradient norm "
            f"{norm}; {_culprits(samples)}. Lower the critic's learning rate or check these rows"
        )
    rate = apply_step(critic.optimizer, spec.optimizer, critic.updates)
    critic.updates += 1
    return metrics | {"critic_grad_norm": norm, "critic_lr": rate}


def _culprits(samples: Sequence[Sample]) -> str:
    """Name rows of this rank whose value targets are not finite or, if all are finite, some of its rows."""
    targets = [(sample, sample.old_values, sample.returns) for sample in samples]
    bad = [s.row_id for s, *columns in targets if not all(c is None or np.isfinite(c).all() for c in columns)]
    if bad:
        return (
            f"{len(bad)} rows have value targets (returns) that are not finite: check the judge's rewards: {some(bad)}"
        )
    return f"the value targets (returns) of all rows are finite: {some([sample.row_id for sample in samples])}"


def _column(samples: Sequence[Sample], name: str) -> np.ndarray:
    """A field over the samples' concatenated tokens, float32."""
    return np.concatenate([np.zeros(0, np.float32), *(getattr(sample, name) for sample in samples)])


def _take(column: np.ndarray, part: Pack, counted: bool, device: torch.device) -> Tensor:
    values = column[part.token_source] if counted else np.zeros(len(part.token_source), np.float32)
    return to_device(values, device)


def _metrics(sums: dict[str, float], tokens: float) -> dict[str, float]:
    return {
        "value_loss": sums["value_loss"] / tokens,
        "value_mean": sums["value"] / tokens,
        "return_mean": sums["return"] / tokens,
        "value_clip_fraction": sums["value_clip_fraction"] / tokens,
        "explained_variance": explained_variance(sums, tokens),
    }
