"""The frozen reference model, which a KL penalty in the loss is taken to. Loaded only where a request has one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rft_platform.training.logprobs import PackedPolicy
from rft_platform.training.manifest import identify
from rft_platform.training.model import load_policy
from rft_platform.training.ranks import Ranks
from rft_platform.training.samples import Sample
from rft_platform.training.step import score


class Reference:
    """At most one frozen model, kept between requests."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._held: tuple[str, PackedPolicy] | None = None

    def add_logprobs(self, folder: Path, samples: Sequence[Sample], max_tokens_per_pack: int) -> None:
        """Give every sample its log-probs under the model in ``folder``, at the sample's own temperature."""
        policy = self._model(folder)
        logprobs = score(policy, samples, max_tokens_per_pack=max_tokens_per_pack, reduce=self._ranks.reduce)
        for sample, values in zip(samples, logprobs, strict=True):
            sample.reference_logprobs = np.zeros(len(sample.token_ids), np.float32)
            sample.reference_logprobs[sample.loss_mask] = values

    def _model(self, folder: Path) -> PackedPolicy:
        digest: str = self._ranks.from_first(lambda: identify(folder))
        if self._held is None or self._held[0] != digest:
            policy = load_policy(folder, self._ranks, self._dtype)
            policy.requires_grad_(False)
            self._held = (digest, policy)
        return self._held[1]
