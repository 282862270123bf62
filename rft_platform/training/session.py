"""The trainer's state machine: it holds one state, and requests lead from a parent checkpoint to the next.

After a request, whatever happens in it, the held state is a published one: the request's result, or its parent.
"""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from rft_platform.algorithms.plugins import import_plugins
from rft_platform.errors import RftError, StorageError, TrainerError, UserError
from rft_platform.files import read_json
from rft_platform.training.checkpoint import load_state
from rft_platform.training.frozen import FrozenModel
from rft_platform.training.intermediate import Describe, Intermediates, latest
from rft_platform.training.manifest import STEPS, identify, read_manifest
from rft_platform.training.model import compute_dtype
from rft_platform.training.optimizer import build_optimizer, check_schedule
from rft_platform.training.plan import Planner, TrainingPlan
from rft_platform.training.preparation import Preparation
from rft_platform.training.protocol import StepEvent, TrainRequest, TrainResult
from rft_platform.training.ranks import Ranks
from rft_platform.training.results import describe, is_published, no_op, publish, published_before
from rft_platform.training.run_steps import OnStep, StepRun
from rft_platform.training.samples import demonstration_sample
from rft_platform.training.state import TrainerState
from rft_platform.training.step import score
from rft_platform.training.step_metrics import Stopwatch
from rft_platform.training.trajectories import check_token_parts
from rft_platform.training.window import build_objective

LOG = logging.getLogger(__name__)
_SCORE_PACK = 16384  # tokens


class TrainingSession:
    """Trains and scores on all ranks: every rank makes the same calls in the same order."""

    def __init__(self, ranks: Ranks, dtype: str = "auto") -> None:
        self.ranks = ranks
        self.dtype = compute_dtype(dtype, ranks.device)
        self.state: TrainerState | None = None
        self._planner = Planner()
        self._preparation = Preparation(FrozenModel(ranks, self.dtype), FrozenModel(ranks, self.dtype))

    def train(self, request: TrainRequest, on_step: OnStep, cancelled: Callable[[], bool]) -> TrainResult:
        """Train and publish; see ``TrainRequest``. ``cancelled`` is called before every step; rank 0's answer counts.

        Raises TrainingCancelled, NonFiniteError, UserError or StorageError. If the training fails after it has started,
        the parent's state is held again.
        """
        watch, cpu = Stopwatch(), time.process_time()
        parent = Path(request.parent).absolute()
        check_schedule(request.optimizer)
        if request.algorithm.critic is not None:
            check_schedule(request.algorithm.critic.optimizer)
        import_plugins(request.algorithm.plugins)
        check_token_parts(request.algorithm)
        objective = build_objective(request.algorithm)
        with watch.time("data"):
            parent_digest: str = self.ranks.from_first(lambda: identify(parent))
            formats = (str(self.dtype).removeprefix("torch."), self.ranks.layout.reduce_dtype)
            plan = self._planner.plan(request, parent, parent_digest, objective, formats)
        target = Path(request.output).absolute() / f"global_step_{request.parent_version + len(plan.steps)}"
        reused = self._reuse(target, plan, request, on_step)
        if reused is not None:
            return reused
        with watch.time("load"):
            run = StepRun(self._hold(parent, parent_digest, request), plan, request, self.ranks, watch)
        if not plan.steps:
            return no_op(run.state, plan, request, self.ranks, watch, cpu)
        run.state.digest = ""  # until it is published, the state is not that of any folder
        try:
            return self._run(run, target, partial(describe, run, parent_digest, cpu), on_step, cancelled)
        except RftError as error:
            del run
            _forget_frames(error)
            self._hold(parent, parent_digest, request)
            raise

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1; the first token's is 0.0."""
        if self.state is None:
            raise TrainerError("the trainer holds no weights yet: train first, then score")
        if not all(sequences):
            raise UserError("a sequence to score is empty: expected at least one token id")
        samples = [
            demonstration_sample(str(index), list(ids), np.arange(len(ids)) > 0) for index, ids in enumerate(sequences)
        ]
        tokens = self.state.policy.compiled_for or _SCORE_PACK
        values = score(self.state.policy, samples, max_tokens_per_pack=tokens, reduce=self.ranks.reduce)
        return [[0.0, *row.tolist()] for row in values]

    def _run(
        self, run: StepRun, target: Path, manifest: Describe, on_step: OnStep, cancelled: Callable[[], bool]
    ) -> TrainResult:
        """Prepare the rows with the parent's policy, then run the steps that a killed trainer did not complete."""
        self._preparation.prepare(run)
        events = self._resume(run, on_step)
        saves = Intermediates(run, manifest)
        try:
            run.run(on_step, cancelled, events, saves.after_step)
        except RftError:  # raised on all ranks; after any other error a rank ends without waiting
            saves.wait()
            raise
        saves.wait()
        result = publish(target, run, manifest(events), events)
        saves.clear()
        return result

    def _resume(self, run: StepRun, on_step: OnStep) -> list[StepEvent]:
        """Resume from the last intermediate checkpoint of this training; return the events of the steps before it."""
        output, identity = Path(run.request.output), run.plan.identity
        found = self.ranks.from_first(lambda: latest(output, identity))
        if found is None:
            return []
        kept = replace(run.request, parent_version=found["version"], fresh_optimizer=False)
        with run.watch.time("load"):
            parent = run.state.folder
            del run.state  # only the session may hold the state that is replaced next
            run.state = self._hold(Path(found["folder"]), found["digest"], kept)
        run.state.folder = parent  # tokenizer and templates are copied from there: the intermediate folder is removed
        run.state.digest = ""
        events = [StepEvent(**event) for event in read_json(Path(found["folder"]) / STEPS)]
        LOG.info("going on after step %d, from %s", found["version"], found["folder"])
        for event in events:
            on_step(replace(event, told_again=True))
        return events

    def _hold(self, folder: Path, digest: str, request: TrainRequest) -> TrainerState:
        """Hold the state of ``folder``, which has this digest. Read it from disk unless exactly this state is held.

        Memory does not suffice for two states: the caller must keep no reference to the previous one.
        """
        state = self.state
        exact = state is not None and state.digest == digest and state.serves(request.lora, request.algorithm.critic)
        if state is not None and exact and not request.fresh_optimizer:
            state.folder = folder
            state.optimizer = build_optimizer(state.policy.model, request.optimizer, state.optimizer)
            if state.critic is not None and request.algorithm.critic is not None:
                state.critic.take_settings(request.algorithm.critic)
            return state
        if state is not None:
            self.state = state = None  # free it before the next state is read
            gc.collect()  # sharded models contain reference cycles
        self.state = load_state(
            folder,
            self.ranks,
            self.dtype,
            request.optimizer,
            lora=request.lora,
            version=request.parent_version,
            seed=request.seed,
            fresh=request.fresh_optimizer,
            critic=request.algorithm.critic,
        )
        return self.state

    def _reuse(self, target: Path, plan: TrainingPlan, request: TrainRequest, on_step: OnStep) -> TrainResult | None:
        """Return the result of an identical request that was published before; its weights are then held.

        None if there is none, or if it is damaged and must be produced again.
        """
        hf = request.save_hf_checkpoint != "never"
        if not plan.steps or not self.ranks.from_first(lambda: is_published(target, plan.identity, hf)):
            return None
        manifest = read_manifest(target)
        assert manifest is not None
        kept = replace(request, parent_version=manifest.policy_version, fresh_optimizer=False)
        try:
            self._hold(target, manifest.state_digest, kept)
        except StorageError as error:
            LOG.warning("%s is made again: %s", target, error)
            return None
        for event in read_json(target / STEPS):
            on_step(StepEvent(**event))
        return published_before(target, manifest, plan)


def _forget_frames(error: BaseException) -> None:
    """Drop the local variables of the frames behind ``error`` and behind the errors that caused it."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
