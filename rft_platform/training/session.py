"""The trainer's state machine: one held state, and requests that lead from a parent checkpoint to the next.

Whatever happens inside a request, the state held afterwards is a published one: the request's result, or its parent.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from rft_platform.algorithms.plugins import import_plugins
from rft_platform.errors import RftError, StorageError, TrainerError, UserError
from rft_platform.files import read_json
from rft_platform.training.checkpoint import load_state
from rft_platform.training.draft import Draft
from rft_platform.training.frozen import FrozenModel
from rft_platform.training.intermediate import Describe, Intermediates, latest
from rft_platform.training.manifest import STEPS, Manifest, identify, library_versions, read_manifest
from rft_platform.training.model import compute_dtype
from rft_platform.training.optimizer import build_optimizer, check_schedule
from rft_platform.training.plan import Planner, TrainingPlan
from rft_platform.training.preparation import Preparation
from rft_platform.training.protocol import StepEvent, TrainRequest, TrainResult
from rft_platform.training.publishing import Publication
from rft_platform.training.ranks import Ranks
from rft_platform.training.run_steps import OnStep, StepRun
from rft_platform.training.samples import demonstration_sample
from rft_platform.training.state import TrainerState
from rft_platform.training.step import score
from rft_platform.training.step_metrics import Stopwatch, row_metrics, summarise
from rft_platform.training.trajectories import check_token_parts
from rft_platform.training.window import build_objective

LOG = logging.getLogger(__name__)
_SCORE_PACK = 16384  # tokens


class TrainingSession:
    """Trains and scores on all ranks alike: every rank makes the same calls in the same order."""

    def __init__(self, ranks: Ranks, dtype: str = "auto") -> None:
        self.ranks = ranks
        self.dtype = compute_dtype(dtype, ranks.device)
        self.state: TrainerState | None = None
        self._planner = Planner()
        self._preparation = Preparation(FrozenModel(ranks, self.dtype), FrozenModel(ranks, self.dtype))

    def train(self, request: TrainRequest, on_step: OnStep, cancelled: Callable[[], bool]) -> TrainResult:
        """Train and publish; see ``TrainRequest``. ``cancelled`` is asked on rank 0 before every step.

        Raises TrainingCancelled, NonFiniteError, UserError or StorageError; the parent's state is held after those.
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
            plan = self._planner.plan(request, parent, parent_digest, objective)
        target = Path(request.output).absolute() / f"global_step_{request.parent_version + len(plan.steps)}"
        reused = self._reuse(target, plan, request, on_step)
        if reused is not None:
            return reused
        with watch.time("load"):
            state = self._hold(parent, parent_digest, request)
        if not plan.steps:
            return self._no_op(state, plan, request, watch, cpu)
        run = StepRun(state, plan, request, self.ranks, watch)
        state.digest = ""  # from now on it is nobody's state, until it is published
        try:
            return self._run(run, target, partial(self._describe, run, parent_digest, cpu), on_step, cancelled)
        except RftError:
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
        values = score(self.state.policy, samples, max_tokens_per_pack=_SCORE_PACK, reduce=self.ranks.reduce)
        return [[0.0, *row.tolist()] for row in values]

    def _run(
        self, run: StepRun, target: Path, describe: Describe, on_step: OnStep, cancelled: Callable[[], bool]
    ) -> TrainResult:
        """All steps from what the parent's policy says of the rows, or those that a killed trainer did not come to."""
        self._preparation.prepare(run)
        events = self._resume(run, on_step)
        saves = Intermediates(run, describe)
        try:
            run.run(on_step, cancelled, events, saves.after_step)
        except RftError:  # of all ranks alike; after any other error a rank ends without waiting for one
            saves.wait()
            raise
        saves.wait()
        result = self._publish(target, run, describe(events), events)
        saves.clear()
        return result

    def _resume(self, run: StepRun, on_step: OnStep) -> list[StepEvent]:
        """Go on from the last checkpoint on the way through this very training; the steps behind it."""
        output, identity = Path(run.request.output), run.plan.identity
        found = self.ranks.from_first(lambda: latest(output, identity))
        if found is None:
            return []
        kept = replace(run.request, parent_version=found["version"], fresh_optimizer=False)
        with run.watch.time("load"):
            parent = run.state.folder
            run.state = self._hold(Path(found["folder"]), found["digest"], kept)
        run.state.folder = parent  # tokenizer and templates are copied from there: this one is removed on the way
        run.state.digest = ""
        events = [StepEvent(**event) for event in read_json(Path(found["folder"]) / STEPS)]
        LOG.info("going on after step %d, from %s", found["version"], found["folder"])
        for event in events:
            on_step(event)
        return events

    def _hold(self, folder: Path, digest: str, request: TrainRequest) -> TrainerState:
        """Hold the state of ``folder``, which has this digest, reading it unless it is exactly the one that is held."""
        state = self.state
        exact = state is not None and state.digest == digest and state.serves(request.lora, request.algorithm.critic)
        if state is not None and exact and not request.fresh_optimizer:
            state.folder = folder
            state.optimizer = build_optimizer(state.policy.model, request.optimizer, state.optimizer)
            if state.critic is not None and request.algorithm.critic is not None:
                state.critic.take_settings(request.algorithm.critic)
            return state
        self.state = state = None  # free it before the next one is read
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
        """The result of an identical request that was published before; its weights are then held.

        None where there is none, or where it is damaged: it is then made again.
        """
        hf = request.save_hf_checkpoint != "never"
        if not plan.steps or not self.ranks.from_first(lambda: _is_published(target, plan.identity, hf)):
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
        return TrainResult(
            checkpoint=str(target),
            policy_version=manifest.policy_version,
            weights_digest=manifest.weights_digest,
            steps=len(plan.steps),
            reused=True,
            **manifest.result,
        )

    def _no_op(
        self, state: TrainerState, plan: TrainingPlan, request: TrainRequest, watch: Stopwatch, cpu: float
    ) -> TrainResult:
        """No row carries a gradient: the parent, which is held, is the result."""
        rows = np.arange(len(plan.rows.samples))
        metrics = row_metrics(plan.rows, rows, request.parent_version) if len(rows) else {}
        return TrainResult(
            checkpoint=str(state.folder),
            policy_version=request.parent_version,
            weights_digest=state.weights_digest,
            steps=0,
            metrics=metrics | {"rows": float(len(rows)), "rows_dropped": float(plan.rows.dropped)},
            seconds=watch.seconds,
            cpu_seconds=self.ranks.total(time.process_time() - cpu),
        )

    def _describe(self, run: StepRun, parent_digest: str, cpu: float, events: Sequence[StepEvent]) -> Manifest:
        """The manifest, without digests, of the state after these steps. Every rank must call it."""
        state, plan, settings = run.state, run.plan, asdict(run.request)
        metrics = summarise([event.metrics for event in events]) | {"rows_dropped": float(plan.rows.dropped)}
        spent = self.ranks.total(time.process_time() - cpu)
        return Manifest(
            policy_version=events[-1].step,
            parent=str(Path(run.request.parent).absolute()),
            parent_version=run.request.parent_version,
            parent_digest=parent_digest,
            request_digest=plan.identity,
            weights_digest="",
            lineage=settings.pop("lineage"),
            request=settings,
            result={"metrics": metrics, "seconds": run.watch.seconds, "cpu_seconds": spent},
            created_at=time.time(),
            versions=library_versions(),
            dtype=str(state.dtype).removeprefix("torch."),
            files={},
            base_model=None if state.base_model is None else str(state.base_model),
            lora=settings["lora"],
        )

    def _publish(self, target: Path, run: StepRun, manifest: Manifest, events: list[StepEvent]) -> TrainResult:
        state, steps = run.state, [asdict(event) for event in events]
        with run.watch.time("save"):
            hf = run.request.save_hf_checkpoint != "never"
            draft = Draft.take(state, run.plan.position, self.ranks, hf=hf, copy=False)
            manifest = Publication(target, draft, manifest, steps, self.ranks).start(background=False).finish()
        state.folder, state.digest = target, manifest.state_digest
        state.weights_digest, state.policy_version = manifest.weights_digest, manifest.policy_version
        return TrainResult(
            checkpoint=str(target),
            policy_version=manifest.policy_version,
            weights_digest=manifest.weights_digest,
            steps=len(events),
            **manifest.result,
        )


def _is_published(target: Path, identity: str, hf: bool) -> bool:
    """Whether the checkpoint of this training is there, with weights in Hugging Face format if those are wanted."""
    try:
        manifest = read_manifest(target)
    except StorageError:
        return False  # unreadable: it will be replaced
    same = manifest is not None and manifest.request_digest == identity
    return same and (not hf or any(target.glob("*.safetensors")))
