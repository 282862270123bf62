"""The KL of the policy to the reference on mismatched rows, which KTO subtracts from every reward.

A mismatched row has the prompt of one pair and an answer of the next pair with another prompt, so that the estimate
does not contain the rewards themselves (arXiv 2402.01306, section 4.1). Which rows belong together depends on the data
alone.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rft_platform.algorithms.objective import Objective
from rft_platform.common.errors import UserError
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.data.samples import Sample, demonstration_sample
from rft_platform.training.distributed import Reduce
from rft_platform.training.packed.packed_policy import PackedPolicy, score


def attach_mismatched(rows: TrainingRows) -> None:
    """Set ``mismatched`` of every row, to its prompt with an answer of the next group that has another prompt.

    For pairs it is the answer of the same side.
    A mismatched row is cut to the length of the longest row, which fits the model. Raises UserError if all prompts are
    equal.
    """
    order = np.argsort(rows.group, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(rows.group[order])) + 1)
    following = _next_with_another_prompt([_prompt(rows.samples[own[0]]).tobytes() for own in members])
    longest = max(len(sample.token_ids) for sample in rows.samples)
    for own, other_group in zip(members, following, strict=True):
        others = members[other_group]
        for place, row in enumerate(own):
            sample, other = rows.samples[row], rows.samples[others[place % len(others)]]
            prompt = _prompt(sample)
            token_ids = np.concatenate([prompt, other.token_ids[other.loss_mask]])[:longest]
            mask = np.arange(len(token_ids)) >= len(prompt)
            sample.mismatched = demonstration_sample(f"{sample.row_id}:mismatched", token_ids, mask)


def _prompt(sample: Sample) -> np.ndarray:
    return sample.token_ids[: int(sample.loss_mask.argmax())]


def _next_with_another_prompt(prompts: list[bytes]) -> list[int]:
    """For each group the next one, cyclically, whose prompt differs."""
    if len(set(prompts)) < 2:
        raise UserError("algorithm_type kto: all prompts are equal; its baseline needs answers to another prompt")
    count = len(prompts)
    following = [0] * count
    for group in reversed(range(2 * count)):  # twice around: the first pass finds the successors of the last groups
        here, after = group % count, (group + 1) % count
        following[here] = after if prompts[after] != prompts[here] else following[after]
    return following


def set_kl_baseline(
    policy: PackedPolicy, samples: Sequence[Sample], objective: Objective, reduce: Reduce, max_tokens_per_pack: int
) -> None:
    """Set ``kl_baseline`` of every sample, if the loss needs it. Every rank must make the same call.

    It is the mean of ``logp - ref`` over the mismatched rows of the step on all ranks, summed over each row's tokens,
    and at least 0.
    """
    if not objective.policy_loss.mismatched:
        return
    rows = [sample.mismatched for sample in samples if sample.mismatched is not None]
    assert len(rows) == len(samples), "the training attaches a mismatched row to every row before its first step"
    total, scored = 0.0, score(policy, rows, max_tokens_per_pack=max_tokens_per_pack, reduce=reduce)
    for row, logp in zip(rows, scored, strict=True):
        assert row.reference_logprobs is not None, "the training computes them before its first step"
        total += float((logp.astype(np.float64) - row.reference_logprobs[row.loss_mask]).sum())
    summed, count = reduce(torch.tensor([total, len(rows)], dtype=torch.float64), "sum").tolist()
    baseline = max(0.0, summed / max(count, 1.0))
    for sample in samples:
        sample.kl_baseline = np.full(len(sample.token_ids), baseline, np.float32)
