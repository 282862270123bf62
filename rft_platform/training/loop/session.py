"""The trainer's state machine: ``TrainingSession.train`` serves one request, stage by stage.

Invariants:

- The session holds one trainer state. A request trains the state of its parent checkpoint further, never another one:
  a parent that is not held is read from disk, or made again by repeating the trainings since the last saved state.
- After a request the session holds the state of the request's result. If the training raised an RftError, it holds the
  state of the parent, or no state if the parent's state is not on disk. After any other error the held state is
  undefined and the process must end.
- A checkpoint is complete or does not exist: its manifest is written last, and the result is returned afterwards.
- A repeated request gives the same weights: order, seeds and divisions depend on the request only, and an intermediate
  checkpoint is used only for the training that wrote it. Ranks and layout of the group affect the rounding.
- All ranks call the same collective operations in the same order; threads that write files call none.
"""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.plugins import import_plugins
from rft_platform.common.digests import MANIFEST, lacks_state
from rft_platform.common.errors import RftError, StorageError, TrainerError, UserError
from rft_platform.common.files import read_json
from rft_platform.training.checkpoint.content import Draft
from rft_platform.training.checkpoint.manifest import STEPS, identify, read_manifest
from rft_platform.training.checkpoint.periodic import PeriodicCheckpoints, latest
from rft_platform.training.checkpoint.reading import load_state
from rft_platform.training.checkpoint.writing import StateSaving
from rft_platform.training.data.samples import demonstration_sample
from rft_platform.training.data.token_advantages import check_token_parts
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.optimizer_step import OptimizerStep
from rft_platform.training.loop.plan import Planner, TrainingPlan
from rft_platform.training.loop.precompute import FrozenModel, Precompute
from rft_platform.training.loop.step_metrics import Stopwatch
from rft_platform.training.loop.training_run import (
    TrainingRun,
    is_published,
    published_before,
    repeated_request,
    steps_of,
    unsaved_until,
    warn_if_different,
)
from rft_platform.training.models.loading import compute_dtype
from rft_platform.training.models.optimizer import check_schedule
from rft_platform.training.models.trainer_state import TrainerState
from rft_platform.training.packed.packed_policy import score, set_longest_row, warm_up
from rft_platform.training.protocol import OnRepeat, StepEvent, TrainRequest, TrainResult

OnStep = Callable[[StepEvent], None]
LOG = logging.getLogger(__name__)
_SCORE_PACK = 16384  # tokens


class TrainingSession:
    """Trains and scores on all ranks: every rank makes the same calls in the same order."""

    def __init__(self, ranks: Ranks, dtype: str = "auto") -> None:
        self.ranks = ranks
        self.dtype = compute_dtype(dtype, ranks.device)
        self.state: TrainerState | None = None
        self._saving: StateSaving | None = None  # saves the state of the last published checkpoint
        self._cancelled: Callable[[], bool] = lambda: False  # whether the caller has cancelled the current request
        self._on_repeat: OnRepeat = lambda steps, trainings: None
        self._planner = Planner()
        self._precompute = Precompute(FrozenModel(ranks, self.dtype), FrozenModel(ranks, self.dtype))
        # dtypes of activations and of gradient sums; they affect the result, so they are part of a training's identity
        self._formats = (str(self.dtype).removeprefix("torch."), ranks.layout.reduce_dtype)

    def train(
        self,
        request: TrainRequest,
        on_step: OnStep,
        cancelled: Callable[[], bool],
        on_repeat: OnRepeat = lambda steps, trainings: None,
    ) -> TrainResult:
        """Serve one training request, from its rows to the published checkpoint; each stage is one call.

        ``on_step`` is called after every optimiser step, and ``on_repeat`` before earlier trainings are repeated.
        ``cancelled`` is called before every step; only rank 0's result counts. Raises TrainingCancelled,
        NonFiniteError, UserError or StorageError. After such an error in a training that has started, the session holds
        the parent's state again. A policy's version is the number of optimiser steps since the start.
        """
        self._save_again_if_failed()
        self._cancelled, self._on_repeat = cancelled, on_repeat
        watch, cpu_start = Stopwatch(), time.process_time()
        objective = build_objective(request)

        # 1. Read the rows and split them into optimiser steps.
        with watch.time("data"):
            parent = Path(request.parent).absolute()
            parent_digest: str = self.ranks.from_first(lambda: identify(parent))
            plan = self._planner.plan(request, parent, parent_digest, objective, self._formats)
        target = Path(request.output).absolute() / f"global_step_{request.counts_from + len(plan.steps)}"
        reused = self._reuse(target, plan, request, on_step)
        if reused is not None:
            PeriodicCheckpoints(request, plan.identity, self.ranks).clear()  # left by a trainer that was killed
            return reused

        # 2. Load the parent: policy, optimizer, critic and random state.
        with watch.time("load"):
            state = self._ensure_state(parent, parent_digest, request)
        run = TrainingRun(state, plan, request, self.ranks, parent_digest, watch, cpu_start)
        del state  # only the session and the run may refer to the state
        if not plan.steps:  # no row has a gradient
            return run.without_steps()

        with self._parent_restored_on_error(run):
            # 3. Compute the values that the rows need, resume an interrupted training, run the optimiser steps.
            done_steps = self._optimise(run, on_step)

            # 4. Publish the checkpoint: its weights now; the trainer state now, or later in the background.
            self._await_saving()
            result, self._saving = run.publish(target, done_steps)
            PeriodicCheckpoints(request, plan.identity, self.ranks).clear()  # they are no longer needed
            return result

    def _optimise(self, run: TrainingRun, on_step: OnStep) -> list[StepEvent]:
        """Train the state of ``run`` on all steps of the plan, or on those after the last intermediate checkpoint."""
        _set_longest_row(run)

        # 1. Compute the values that the rows need: log-probs of reference, teacher and old policy, critic values, token
        # advantages. They need the parent's weights, so they are computed before a resumed state replaces these
        # weights.
        self._precompute.compute(run)

        # 2. Continue after the last intermediate checkpoint, if an earlier trainer was killed in this training.
        done_steps = self._resume(run, on_step)
        with run.watch.time("compile"):
            warm_up(run.state.policy, run.request.max_tokens_per_pack)

        # 3. Run the optimiser steps.
        with PeriodicCheckpoints(run.request, run.plan.identity, self.ranks) as checkpoints:
            for rows in run.plan.steps[len(done_steps) :]:
                run.check_cancelled(self._cancelled, done=len(done_steps))
                step = OptimizerStep(run, rows, done=len(done_steps))
                if step.trains_policy:  # False while the critic warms up
                    step.accumulate_gradients()  # for each pack of rows: log-probs, loss, backward pass
                    step.update_policy()  # clip the gradient, then AdamW
                step.update_critic()
                done_steps.append(step.event())
                on_step(done_steps[-1])
                if checkpoints.is_due(done_steps[-1].step, remaining=len(run.plan.steps) - len(done_steps)):
                    # Save an intermediate checkpoint if it is due. A resumed training continues at ``position`` of its
                    # demonstrations or pairs. ``manifest`` of the run makes the manifest from the steps that the state
                    # contains.
                    position = run.plan.position_after(len(done_steps))
                    with run.watch.time("save"):
                        checkpoints.save(run.state, position, run.manifest, done_steps)
        return done_steps

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1; the first token's is 0.0."""
        if self.state is None:
            raise TrainerError("the trainer holds no weights yet: train first, then score")
        if not all(sequences):
            raise UserError("a sequence to score is empty: expected at least one token id")
        samples = [
            demonstration_sample(str(index), list(ids), np.arange(len(ids)) > 0) for index, ids in enumerate(sequences)
        ]
        tokens = max(self.state.policy.compiled_for, default=_SCORE_PACK)
        values = score(self.state.policy, samples, max_tokens_per_pack=tokens, reduce=self.ranks.reduce)
        return [[0.0, *row.tolist()] for row in values]

    def close(self) -> None:
        """Save the held state if it is not on disk, because the trainer ends. Every rank must call it."""
        self._await_saving()
        state = self.state
        if state is None or not state.digest or not self.ranks.from_first(lambda: lacks_state(state.folder)):
            return
        _, held = Draft.take(state, None, self.ranks, hf=True, copy=False).split()
        self._saving = StateSaving(state.folder, held, self.ranks, with_state=True)
        self._saving.begin(background=False)
        self._await_saving()

    def _await_saving(self) -> None:
        """Wait for the running save. A failure is only logged: a later state, or a repeated training, replaces it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            try:
                saving.end()
            except RftError as error:
                LOG.error("%s", error)

    def _save_again_if_failed(self) -> None:
        """If the last state could not be saved, try once more before the next training; raise the error of this try."""
        failed = self._saving
        if failed is None or not self.ranks.largest(float(failed.failed)):
            return
        self._await_saving()
        if not self.ranks.from_first((failed.folder / MANIFEST).exists):
            return  # the checkpoint was moved aside because it is damaged
        self._saving = failed  # in case that the new attempt cannot begin
        again = failed.again()
        again.begin(background=False)
        self._saving = again
        again.end()

    def _repeat(self, folder: Path, request: TrainRequest) -> None:
        """Restore the state of ``folder``, which was not saved, by repeating the trainings since the last saved state.

        Raises DamagedError if the weights in ``folder`` are not the published ones, and StorageError if a training
        cannot be repeated exactly, or if ``request`` trains another adapter or critic.
        """
        unsaved = [Path(each) for each in self.ranks.from_first(lambda: unsaved_until(folder))]
        self._on_repeat(sum(map(steps_of, unsaved)), len(unsaved))
        for each in unsaved:  # oldest first
            self._repeat_training(each)
        state = self.state
        assert state is not None
        if not state.serves(request.lora, request.algorithm.critic):
            raise StorageError(
                f"{folder}: its trainer state was not saved, and the request trains another adapter or critic: send "
                "the request with the adapter and critic of the previous training"
            )
        warn_if_different(state, folder, self.ranks)

    def _repeat_training(self, folder: Path) -> None:
        """Repeat the training that made ``folder``, from its parent's state, and hold the resulting state."""
        manifest = read_manifest(folder)
        assert manifest is not None
        repeated = repeated_request(folder, manifest)
        parent = Path(repeated.parent).absolute()
        LOG.info("the trainer state of %s was not saved: repeating its training from %s", folder, parent)
        try:
            parent_digest: str = self.ranks.from_first(lambda: identify(parent))
            plan = self._planner.plan(repeated, parent, parent_digest, build_objective(repeated), self._formats)
            if plan.identity != manifest.request_digest:
                raise StorageError("rows, parent checkpoint or settings differ from those recorded in its manifest")
        except (RftError, OSError) as error:
            raise StorageError(
                f"{folder}: its trainer state was not saved, and its training cannot be repeated: {error}; restore "
                "the missing files, or start a project with another name from this checkpoint"
            ) from error
        run = TrainingRun(self._ensure_state(parent, parent_digest, repeated), plan, repeated, self.ranks)
        run.state.digest = ""  # marks the state as modified
        try:
            self._optimise(run, lambda event: LOG.info("repeated step %d", event.step))
        except RftError:
            run.drop_state()
            self._release()
            raise
        state = run.state
        state.folder, state.digest = folder, manifest.state_digest
        state.weights_digest, state.policy_version = manifest.weights_digest, manifest.policy_version

    def _release(self) -> None:
        """Free the held state, also if the object that saved it still refers to it."""
        self._await_saving()
        self.state = None
        gc.collect()  # sharded models contain reference cycles

    @contextmanager
    def _parent_restored_on_error(self, run: TrainingRun) -> Iterator[None]:
        """After an RftError in the body, drop the state of ``run`` and hold its parent's state again.

        If the parent's state is not saved, the session then holds no state: the next request repeats the parent's
        training.
        """
        run.state.digest = ""  # marks the state as modified, so that it is not reused as the state of its folder
        try:
            yield
        except RftError as error:
            run.drop_state()
            _forget_frames(error)  # the error's frames keep tensors alive, and memory does not suffice for two states
            self._release()
            parent = Path(run.request.parent).absolute()
            if not self.ranks.from_first(lambda: lacks_state(parent)):
                self._ensure_state(parent, run.parent_digest, run.request)
            raise

    def _resume(self, run: TrainingRun, on_step: OnStep) -> list[StepEvent]:
        """Resume from the last intermediate checkpoint of this training; return the events of the steps in it."""
        output, identity = Path(run.request.output), run.plan.identity
        found = self.ranks.from_first(lambda: latest(output, identity))
        if found is None:
            return []
        resumed_request = replace(run.request, parent_version=found["version"], fresh_optimizer=False)
        with run.watch.time("load"):
            parent = run.state.folder
            run.drop_state()  # only the session may refer to the state, because ``_ensure_state`` replaces it
            run.state = self._ensure_state(Path(found["folder"]), found["digest"], resumed_request)
        run.state.folder = parent  # source of tokenizer and templates, because the intermediate checkpoint is removed
        run.state.digest = ""  # marks the state as modified
        _set_longest_row(run)
        events = [StepEvent(**event) for event in read_json(Path(found["folder"]) / STEPS)]
        LOG.info("continuing after step %d, from %s", found["version"], found["folder"])
        for event in events:
            on_step(replace(event, reported_before=True))
        return events

    def _ensure_state(self, folder: Path, digest: str, request: TrainRequest) -> TrainerState:
        """Hold the state of ``folder``, whose identity is ``digest``. Read it from disk unless the session holds it.

        Memory does not suffice for two states: the caller must keep no reference to the previous state.
        """
        state = self.state
        exact = state is not None and state.digest == digest and state.serves(request.lora, request.algorithm.critic)
        if state is not None and exact and not request.fresh_optimizer:
            state.continue_with(request.optimizer, request.algorithm.critic, folder)
            return state
        del state
        self._release()  # before the next state is read
        if not request.fresh_optimizer and self.ranks.from_first(lambda: lacks_state(folder)):
            self._repeat(folder, request)
            assert self.state is not None
            self.state.continue_with(request.optimizer, request.algorithm.critic, folder)
            return self.state
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

        None if no identical request was published, or if its checkpoint is damaged: the caller then trains again.
        """
        hf = request.save_hf_checkpoint != "never"
        if not plan.steps or not self.ranks.from_first(lambda: is_published(target, plan.identity, hf)):
            return None
        manifest = read_manifest(target)
        assert manifest is not None
        resumed_request = replace(request, parent_version=manifest.policy_version, fresh_optimizer=False)
        try:
            self._ensure_state(target, manifest.state_digest, resumed_request)
        except StorageError as error:
            LOG.warning("checkpoint %s is damaged, so its training is repeated: %s", target, error)
            return None
        for event in read_json(target / STEPS):
            on_step(StepEvent(**event))
        return published_before(target, manifest, plan)


def _set_longest_row(run: TrainingRun) -> None:
    """Tell the models of the state how long the rows of the training can be."""
    set_longest_row(run.state.policy, run.request.max_tokens_per_row)
    if run.state.critic is not None:
        set_longest_row(run.state.critic.model, run.request.max_tokens_per_row)


def build_objective(request: TrainRequest) -> Objective:
    """Import the plugins and build the objective. Raises UserError if parts of the algorithm do not fit each other."""
    algorithm = request.algorithm
    check_schedule(request.optimizer)
    if algorithm.critic is not None:
        check_schedule(algorithm.critic.optimizer)
    import_plugins(algorithm.plugins)
    check_token_parts(algorithm)
    return Objective.build(algorithm)


def _forget_frames(error: BaseException) -> None:
    """Drop the local variables of the frames behind ``error`` and behind the errors that caused it."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
