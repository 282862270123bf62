"""The outcome of a training: its manifest, the published checkpoint, and results of identical earlier requests."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from rft_platform.errors import StorageError
from rft_platform.training.draft import Draft
from rft_platform.training.manifest import Manifest, library_versions, read_manifest
from rft_platform.training.plan import TrainingPlan
from rft_platform.training.protocol import StepEvent, TrainRequest, TrainResult
from rft_platform.training.publishing import Publication
from rft_platform.training.ranks import Ranks
from rft_platform.training.run_steps import StepRun
from rft_platform.training.state import TrainerState
from rft_platform.training.step_metrics import Stopwatch, row_metrics, summarise


def describe(run: StepRun, parent_digest: str, cpu: float, events: Sequence[StepEvent]) -> Manifest:
    """Build the manifest of the state after these steps, without file digests. Every rank must call it.

    ``cpu`` is the processor time of this process when the training began, in seconds.
    """
    state, plan, settings = run.state, run.plan, asdict(run.request)
    metrics = summarise([event.metrics for event in events]) | plan.rows.left_out()
    spent = run.ranks.total(time.process_time() - cpu)
    return Manifest(
        policy_version=events[-1].step,
        parent=str(Path(run.request.parent).absolute()),
        parent_version=run.request.parent_version,
        parent_digest=parent_digest,
        request_digest=plan.identity,
        weights_digest="",
        lineage=settings.pop("lineage"),
        request=settings,
        result={"metrics": metrics, "seconds": dict(run.watch.seconds), "cpu_seconds": spent},
        created_at=time.time(),
        versions=library_versions(),
        dtype=str(state.dtype).removeprefix("torch."),
        files={},
        base_model=None if state.base_model is None else str(state.base_model),
        base_digest=state.base_digest,
        lora=settings["lora"],
    )


def publish(target: Path, run: StepRun, manifest: Manifest, events: Sequence[StepEvent]) -> TrainResult:
    """Publish the state of ``run`` as ``target``; the state then refers to ``target``. Every rank must call it."""
    state, steps = run.state, [asdict(event) for event in events]
    with run.watch.time("save"):
        hf = run.request.save_hf_checkpoint != "never"
        draft = Draft.take(state, run.plan.position, run.ranks, hf=hf, copy=False)
        manifest = Publication(target, draft, manifest, steps, run.ranks).start(background=False).finish()
    state.folder, state.digest = target, manifest.state_digest
    state.weights_digest, state.policy_version = manifest.weights_digest, manifest.policy_version
    return TrainResult(
        checkpoint=str(target),
        policy_version=manifest.policy_version,
        weights_digest=manifest.weights_digest,
        steps=len(events),
        **(manifest.result | {"seconds": dict(run.watch.seconds)}),
    )


def published_before(target: Path, manifest: Manifest, plan: TrainingPlan) -> TrainResult:
    """Return the result of the same training, read from its checkpoint in ``target``."""
    return TrainResult(
        checkpoint=str(target),
        policy_version=manifest.policy_version,
        weights_digest=manifest.weights_digest,
        steps=len(plan.steps),
        reused=True,
        **manifest.result,
    )


def is_published(target: Path, identity: str, hf: bool) -> bool:
    """Whether ``target`` holds the checkpoint of this training, with Hugging Face weights if ``hf``."""
    try:
        manifest = read_manifest(target)
    except StorageError:
        return False  # unreadable: the training replaces it
    same = manifest is not None and manifest.request_digest == identity
    return same and (not hf or any(target.glob("*.safetensors")))


def no_op(
    state: TrainerState, plan: TrainingPlan, request: TrainRequest, ranks: Ranks, watch: Stopwatch, cpu: float
) -> TrainResult:
    """Return the result if no row has a gradient: the parent, whose ``state`` is held. Every rank must call it."""
    rows = np.arange(len(plan.rows.samples))
    metrics = row_metrics(plan.rows, rows, request.parent_version)
    return TrainResult(
        checkpoint=str(state.folder),
        policy_version=request.parent_version,
        weights_digest=state.weights_digest,
        steps=0,
        metrics=metrics | {"rows": float(len(rows))} | plan.rows.left_out(),
        seconds=watch.seconds,
        cpu_seconds=ranks.total(time.process_time() - cpu),
    )
