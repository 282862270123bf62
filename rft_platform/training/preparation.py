"""Prepare rows before the first step of a training: log-probs of frozen models, and token advantages made from them.

All values are of the policy as it is when the training starts; no gradient is computed. Only what the algorithm needs
is computed: the defaults (no KL, ratio to the rollout log-probs) need no forward pass at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rft_platform.files import digest_json
from rft_platform.training.critic_step import give_values
from rft_platform.training.distillation import check_vocabulary
from rft_platform.training.frozen import FrozenModel, give_logprobs, give_reference, without_adapter
from rft_platform.training.manifest import identify
from rft_platform.training.run_steps import StepRun
from rft_platform.training.samples import Sample
from rft_platform.training.trajectories import give_token_advantages


@dataclass(slots=True)
class Preparation:
    """The frozen models of a trainer. Each is loaded on first use and kept."""

    reference: FrozenModel
    teacher: FrozenModel

    def prepare(self, run: StepRun) -> None:
        """Add to this rank's rows of ``run`` what its algorithm reads. Every rank must call it."""
        request, algorithm = run.request, run.request.algorithm
        rows = _rows_of_rank(run)
        samples = [run.plan.rows.samples[row] for row in rows]
        reduce, budget = run.ranks.reduce, request.max_tokens_per_pack
        if needs_reference(run):
            with run.watch.time("reference"):
                self._give_reference(run)
        if request.teacher is not None:
            with run.watch.time("teacher"):
                self._give_teacher(run, Path(request.teacher).absolute(), samples)
        if algorithm.correction == "decoupled":
            with run.watch.time("old_logprobs"):
                give_logprobs(run.state.policy, "old_logprobs", samples, budget, reduce)
        if run.state.critic is not None:
            with run.watch.time("values"):
                give_values(run.state.critic.model, samples, max_tokens_per_pack=budget, reduce=reduce)
        if algorithm.token_advantage is not None:
            made = give_token_advantages(run.plan.rows, rows, algorithm, run.state.kl_control, run.ranks)
            run.prepared, run.state.kl_control = made.metrics, made.kl_control

    def _give_reference(self, run: StepRun) -> None:
        """Compute reference log-probs. The unchanged policy computes them if it started from the reference.

        With an adapter, that is the base model below it; it is also the reference if the request names none.
        """
        request, state = run.request, run.state
        folder = state.base_model if request.reference is None else Path(request.reference).absolute()
        assert folder is not None, "the plan checks that there is a reference"
        own = state.base_model or Path(request.parent).absolute()
        digest = run.ranks.from_first(lambda: identify(folder))
        held = digest if own == folder else run.ranks.from_first(lambda: identify(own))
        give = partial(
            give_reference,
            rows=run.plan.rows,
            needed=np.unique(np.concatenate(run.plan.steps)),
            source=digest_json([digest, request.seed, request.max_tokens_per_pack]),
            seed=request.seed,
            max_tokens_per_pack=request.max_tokens_per_pack,
            ranks=run.ranks,
        )
        if digest == held:
            with without_adapter(state.policy) as policy:
                give(lambda: policy)
        else:
            give(lambda: self.reference.model(folder))

    def _give_teacher(self, run: StepRun, folder: Path, samples: Sequence[Sample]) -> None:
        """A distillation loss reads the teacher itself; a token advantage reads its log-probs."""
        student = run.state.base_model or run.state.folder
        run.ranks.from_first(lambda: check_vocabulary(student, folder))
        teacher = self.teacher.model(folder)
        if run.plan.objective.policy_loss.teacher:
            run.teacher = teacher
        else:
            budget, reduce = run.request.max_tokens_per_pack, run.ranks.reduce
            give_logprobs(teacher, "teacher_logprobs", samples, budget, reduce)


def needs_reference(run: StepRun) -> bool:
    """Whether any part of the algorithm measures a distance to the reference model."""
    return run.plan.objective.needs_reference or run.request.algorithm.kl_penalty is not None


def _rows_of_rank(run: StepRun) -> np.ndarray:
    return np.unique(np.concatenate([run.share(step) for step in run.plan.steps]))
