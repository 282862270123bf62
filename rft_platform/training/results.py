"""What a training comes to: its manifest, the checkpoint that is published, and results that were published before."""

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
    """The manifest, without digests of files, of the state after these steps. Every rank must call it.

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
    """Publish the state of ``run``, which is then that of ``target``. Every rank must call it."""
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
    """The result of this very training as its checkpoint in ``target`` tells it."""
    return TrainResult(
        checkpoint=str(target),
        policy_version=manifest.policy_version,
        weights_digest=manifest.weights_digest,
        steps=len(plan.steps),
        reused=True,
        **manifest.result,
    )


def is_published(target: Path, identity: str, hf: bool) -> bool:
    """Whether the checkpoint of this training is there, with weights in Hugging Face format if those are wanted."""
    try:
        manifest = read_manifest(target)
    except StorageError:
        return False  # unreadable: it will be replaced
    same = manifest is not None and manifest.request_digest == identity
    return same and (not hf or any(target.glob("*.safetensors")))


def no_op(
    state: TrainerState, plan: TrainingPlan, request: TrainRequest, ranks: Ranks, watch: Stopwatch, cpu: float
) -> TrainResult:
    """The result where no row carries a gradient: the parent, whose ``state`` is held. Every rank must call it."""
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
