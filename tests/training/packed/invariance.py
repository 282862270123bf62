"""Every registered loss with rows that suit it, and a step's loss and gradients; also the program of one gloo rank::

torchrun --nproc-per-node 2 invariance.py MODEL_FOLDER RESULT_FOLDER (pack | once | once-on-rank-0) [LOSS ...]

With ``once``, weights are gathered and gradients are summed once a step. Without losses, all are computed.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_model import VOCABULARY, build_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft_platform.algorithms.losses.registry import LOSSES
from rft_platform.algorithms.spec import AlgorithmSpec
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.data.samples import Sample
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.loop.kl_baseline import attach_mismatched
from rft_platform.training.packed.packed_policy import PackedPolicy

#: Settings that weight, correct, mask and add to a loss's tokens in every way there is.
EVERYTHING: dict[str, Any] = {
    "loss_agg_mode": "seq-mean-token-mean",
    "beta": 0.05,
    "entropy_coef": 0.01,
    "token_mask": (0.1, 5.0),
    "row_mask": (0.2, 3.0),
    "token_veto": 0.02,
    "correction": "decoupled",
    "weight_level": "sequence",
}
#: Options with which losses that select tokens select some of the few here.
SELECTING = {
    "clip_cov": {"select_ratio": 0.2, "cov_low": 0.05}, "kl_cov": {"select_ratio": 0.2},
    "clip_b": {"mu": 0.5}, "clip_v": {"mu": 0.5, "max_share": 0.1},
}  # fmt: skip
OF_ROLLOUTS = {
    "token_mask",
    "row_mask",
    "token_veto",
    "correction",
    "weight_level",
}  # need the log-probs of whoever sampled


def build_rows() -> list[Sample]:
    """Three groups of four below prompts that share a head, of very different lengths, one of them a two-turn run."""
    rng = np.random.default_rng(1)
    head = rng.integers(0, VOCABULARY, 5).tolist()
    rows = []
    for group in range(3):
        prompt = [*head, *rng.integers(0, VOCABULARY, 3 + 9 * group).tolist()]
        for member in range(4):
            answer = rng.integers(0, VOCABULARY, 1 + (5 * member + 3 * group) % 11).tolist()
            rows.append(_row(f"{group}-{member}", [*prompt, *answer], len(prompt), group, member, rng))
    rows[3].token_ids[: len(rows[2].token_ids)] = rows[2].token_ids[: len(rows[3].token_ids)]  # a later turn of its run
    rows[3].loss_mask[8:9] = True
    return rows


def _row(name: str, ids: list[int], start: int, group: int, member: int, rng: np.random.Generator) -> Sample:
    count = len(ids)

    def near(level: float) -> np.ndarray:
        return (level + 0.4 * rng.standard_normal(count)).astype(np.float32)

    return Sample(
        name, np.array(ids, np.int32), np.arange(count) >= start, near(-3.0), float(rng.normal()),
        temperature=0.7 if member == 1 else 1.0, weight=0.5 if member == 2 else 1.0, group=group,
        reference_logprobs=near(-3.1), teacher_logprobs=near(-2.5), old_logprobs=near(-3.0),
        entropy_change=np.sin(1.7 * np.arange(count) + member).astype(np.float32),
    )  # fmt: skip


def rows_for(loss: str) -> list[Sample]:
    """Rows as the loss wants them: pairs for a loss of whole groups, some demonstrations for one that mixes."""
    rows = build_rows()
    if LOSSES.get(loss).whole_groups:
        for index, row in enumerate(rows):
            row.group, row.advantage = index // 2, 1.0 - 2.0 * (index % 2)
    if LOSSES.get(loss).mismatched:
        attach_mismatched(TrainingRows(rows, np.array([row.group for row in rows]), ""))
        for row in rows:
            assert row.mismatched is not None
            row.mismatched.reference_logprobs = np.full(len(row.mismatched.token_ids), -6.0, np.float32)
    if loss == "mix":
        for row in rows[::4]:
            row.expert, row.rollout_logprobs, row.old_logprobs = True, None, None
    return rows


def specs() -> dict[str, AlgorithmSpec]:
    """Every loss as it is, and under all settings that it takes."""
    found = {}
    for loss in LOSSES.names():
        mixed, sampled = loss == "mix", LOSSES.get(loss).policy_gradient
        plain = AlgorithmSpec(
            policy_loss=loss, policy_loss_args=SELECTING.get(loss, {}), expert_weight=0.3 if mixed else None
        )
        left_out = OF_ROLLOUTS if not sampled else {"correction"} if mixed else set()
        found[loss] = plain
        found[f"{loss}, everything"] = replace(plain, **{k: v for k, v in EVERYTHING.items() if k not in left_out})
    return found


def over_gloo() -> dict[str, AlgorithmSpec]:
    """Those that real processes compute, too: every loss once."""
    return {name: spec for name, spec in specs().items() if not name.endswith("everything")}


def step(
    policy: PackedPolicy, rows: Sequence[Sample], spec: AlgorithmSpec, teacher: PackedPolicy, **how: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and whole gradients of one step; the policy's gradients are dropped."""
    options = {"max_tokens_per_pack": 10_000} | how
    reads = {"teacher": teacher} if LOSSES.get(spec.policy_loss).teacher else {}
    metrics = accumulate_gradients(policy, rows, spec, **options, **reads)
    gradients = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    policy.zero_grad()
    return metrics, gradients


def main() -> None:
    """One rank: its share of each loss's rows through a sharded policy; rank 0 leaves the whole gradients."""
    from safetensors.torch import save_file

    from rft_platform.training.distributed import Ranks
    from rft_platform.training.models.loading import load_policy
    from rft_platform.training.protocol import Layout

    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    layout, losses = sys.argv[3], sys.argv[4:] or list(over_gloo())
    once = layout == "once" or (layout == "once-on-rank-0" and os.environ["RANK"] == "0")
    ranks = Ranks.join("cpu", Layout(reduce_once=once))
    policy, teacher = load_policy(folder, ranks, torch.float32), PackedPolicy(build_model(seed=1))
    for index, name in enumerate(losses):
        spec = over_gloo()[name]
        mine = [row for row in rows_for(spec.policy_loss) if (row.group == 0) == (ranks.rank == 0)]  # uneven on purpose
        with torch.profiler.profile() as profile:
            metrics, gradients = step(
                policy, mine, spec, teacher, max_tokens_per_pack=30, reduce=ranks.reduce, world_size=ranks.world_size
            )
        names = [event.name for event in profile.events()]
        calls = {name: names.count(f"c10d::{name}") for name in ("_reduce_scatter_base_", "_allgather_base_")}
        if ranks.is_first:
            tensors = {name: tensor.contiguous() for name, tensor in gradients.items()}
            save_file(
                tensors,
                results / f"{index}.safetensors",
                {"spec": name, "loss": repr(metrics["loss"]), "calls": json.dumps(calls)},
            )
    ranks.leave()


if __name__ == "__main__":
    main()
