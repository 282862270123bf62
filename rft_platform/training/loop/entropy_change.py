"""How the entropy of the policy depends on each sampled token, for losses that protect the entropy.

If the logit of a token rises, the entropy H of its distribution changes by ``-S`` to first order, with
``S = p (H + log p)`` and the token's probability p. ``precompute`` calls this before the first step of a training.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rft_platform.training.data.samples import Sample
from rft_platform.training.distributed import Reduce
from rft_platform.training.packed.lm_head import CHUNK_ELEMENTS, LMHead, PackTensors
from rft_platform.training.packed.packed_policy import PackedPolicy, evaluate


def compute_entropy_change(
    policy: PackedPolicy, samples: Sequence[Sample], *, centred: bool, max_tokens_per_pack: int, reduce: Reduce
) -> None:
    """Set ``entropy_change`` of every sample to S of its tokens; 0 for tokens that are not trained.

    ``centred`` subtracts the expectation of S over the policy's distribution. Every rank must make the same call.
    """

    def changes(batch: PackTensors) -> Tensor:
        found: Tensor = policy(batch, through=partial(entropy_change, centred=centred))
        return found

    rows = evaluate(policy, samples, max_tokens_per_pack=max_tokens_per_pack, reduce=reduce, call=changes)
    for sample, values in zip(samples, rows, strict=True):
        sample.entropy_change = values


@torch.no_grad()
def entropy_change(head: LMHead, *, centred: bool) -> Tensor:
    """S of each token of a pack [N]; with ``centred`` less its expectation over the distribution."""
    found = []
    for chunk in head.chunks(CHUNK_ELEMENTS):
        log_softmax = head.log_softmax(chunk)
        softmax = log_softmax.exp()
        entropy = -torch.linalg.vecdot(softmax, log_softmax)
        logp = log_softmax[chunk.pair_head, chunk.pair_target]
        change = logp.exp() * (entropy[chunk.pair_head] + logp)
        if centred:
            squares = softmax.square_()
            expected = entropy * squares.sum(-1) + torch.linalg.vecdot(squares, log_softmax)
            change = change - expected[chunk.pair_head]
        found.append(change)
    return torch.cat(found).index_select(0, head.batch.token_pair)
