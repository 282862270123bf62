"""What rows are given before a training's first step: log-probs of frozen models, and advantages made of them.

Everything here is of the policy as it is when the training starts; no gradient is taken. Only what the algorithm asks
for is computed: with the defaults (no KL, ratio to the engine's own log-probs) no forward pass at all.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rft_platform.training.frozen import FrozenModel, give_logprobs
from rft_platform.training.run_steps import StepRun


@dataclass(slots=True)
class Preparation:
    """The frozen models of a trainer; each is loaded when it is first asked for, and kept."""

    reference: FrozenModel
    teacher: FrozenModel

    def prepare(self, run: StepRun) -> None:
        """Give this rank's rows of ``run`` what its algorithm reads of them. Every rank must call it."""
        request, algorithm = run.request, run.request.algorithm
        rows = _rows_of_rank(run)
        samples = [run.plan.rows.samples[row] for row in rows]
        reduce, budget = run.ranks.reduce, request.max_tokens_per_pack
        if request.reference is not None and needs_reference(run):
            with run.watch.time("reference"):
                self.reference.give(Path(request.reference).absolute(), "reference_logprobs", samples, budget)
        if algorithm.correction == "decoupled":
            with run.watch.time("old_logprobs"):
                give_logprobs(run.state.policy, "old_logprobs", samples, budget, reduce)


def needs_reference(run: StepRun) -> bool:
    """Whether any part of the algorithm measures a distance to the reference model."""
    return run.plan.objective.needs_reference or run.request.algorithm.kl_penalty is not None


def _rows_of_rank(run: StepRun) -> np.ndarray:
    return np.unique(np.concatenate([run.share(step) for step in run.plan.steps]))
