"""Models that are only read: the reference of a KL, the teacher of a distillation. Loaded where a request names one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rft_platform.training.logprobs import PackedPolicy
from rft_platform.training.manifest import identify
from rft_platform.training.model import load_policy
from rft_platform.training.ranks import Ranks
from rft_platform.training.samples import Sample
from rft_platform.training.step import Reduce, score

LogprobField = Literal["reference_logprobs", "teacher_logprobs", "old_logprobs"]


class FrozenModel:
    """At most one model, kept between requests."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._held: tuple[str, PackedPolicy] | None = None

    def give(self, folder: Path, field: LogprobField, samples: Sequence[Sample], max_tokens_per_pack: int) -> None:
        """Give every sample its log-probs under the model in ``folder``, at the sample's own temperature."""
        give_logprobs(self.model(folder), field, samples, max_tokens_per_pack, self._ranks.reduce)

    def model(self, folder: Path) -> PackedPolicy:
        """The model in ``folder``; another one that was held before is dropped."""
        digest: str = self._ranks.from_first(lambda: identify(folder))
        if self._held is None or self._held[0] != digest:
            self._held = None
            policy = load_policy(folder, self._ranks, self._dtype)
            policy.requires_grad_(False)
            self._held = (digest, policy)
        return self._held[1]


def give_logprobs(
    policy: PackedPolicy, field: LogprobField, samples: Sequence[Sample], max_tokens_per_pack: int, reduce: Reduce
) -> None:
    """Set ``field`` of every sample to its log-probs under ``policy``; 0 where a token is not trained."""
    logprobs = score(policy, samples, max_tokens_per_pack=max_tokens_per_pack, reduce=reduce)
    for sample, values in zip(samples, logprobs, strict=True):
        given = np.zeros(len(sample.token_ids), np.float32)
        given[sample.loss_mask] = values
        setattr(sample, field, given)
