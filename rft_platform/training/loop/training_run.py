"""A training in progress: what its stages share, the manifest of its checkpoints, and its result."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from rft_platform.common.digests import lacks_state, weight_files
from rft_platform.common.errors import StorageError, TrainingCancelled
from rft_platform.common.recorded_paths import from_manifest
from rft_platform.training.checkpoint.content import Draft
from rft_platform.training.checkpoint.manifest import Manifest, library_versions, read_manifest, verify
from rft_platform.training.checkpoint.writing import Publication, StateSaving, remove_unfinished
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.plan import TrainingPlan
from rft_platform.training.loop.step_metrics import Stopwatch, row_metrics, summarise
from rft_platform.training.models.trainer_state import TrainerState, gather_weights
from rft_platform.training.packed.flops import TrainingCost, added_flops
from rft_platform.training.packed.packed_policy import PackedPolicy
from rft_platform.training.protocol import StepEvent, TrainRequest, TrainResult, train_request

LOG = logging.getLogger(__name__)
#: Fields of a request that name one file or folder.
_FILES = ("parent", "selection", "demonstrations", "preferences", "reference", "teacher")


@dataclass(slots=True)
class TrainingRun:
    """The state that is trained, and the plan of the training. Every rank makes the same calls."""

    state: TrainerState
    plan: TrainingPlan
    request: TrainRequest
    ranks: Ranks
    parent_digest: str = ""
    watch: Stopwatch = field(default_factory=Stopwatch)  # seconds by phase
    cpu_start: float = field(default_factory=time.process_time)  # processor seconds of the process at the start
    precomputed: dict[str, float] = field(default_factory=dict)  # metrics of ``precompute``, reported with each step
    teacher: PackedPolicy | None = None  # for distillation losses
    _shares: dict[bytes, np.ndarray] = field(default_factory=dict)

    def drop_state(self) -> None:
        """Drop the reference to the state, so that the session can free it and hold another state."""
        with suppress(AttributeError):  # the state was dropped before
            del self.state

    def check_cancelled(self, cancelled: Callable[[], bool], done: int) -> None:
        """Raise TrainingCancelled on all ranks if ``cancelled()`` is true on rank 0. ``done`` steps are complete."""
        if self.ranks.broadcast(cancelled()):
            raise TrainingCancelled(f"training was cancelled before step {done + 1} of {len(self.plan.steps)}")

    def share(self, chosen: np.ndarray) -> np.ndarray:
        """Return this rank's part of a step's rows: the same part in every call, even if rows are modified later."""
        if self.ranks.world_size == 1:
            return chosen
        key = chosen.tobytes()
        if key not in self._shares:
            rows, ranks = self.plan.rows, self.ranks
            self._shares[key] = share_of_rank(chosen, rows.group, self._costs(chosen), ranks.rank, ranks.world_size)
        return self._shares[key]

    def _costs(self, chosen: np.ndarray) -> np.ndarray:
        """Operations that each ``chosen`` row adds. Shared prefixes count once; rows without a gradient add 0."""
        inert = self.plan.objective.zero_advantage_is_inert and self.request.algorithm.token_advantage is None
        samples = [self.plan.rows.samples[row] for row in chosen]
        run = np.array([not inert or sample.expert or bool(np.any(sample.advantage)) for sample in samples])
        costs = np.zeros(len(chosen))
        computed = [sample for sample, is_run in zip(samples, run, strict=True) if is_run]
        costs[run] = added_flops(TrainingCost.of(self.state.policy), computed)
        return costs

    def manifest(self, events: Sequence[StepEvent]) -> Manifest:
        """Build the manifest of the state after ``events``, without file digests. Every rank must call it."""
        state, plan, settings = self.state, self.plan, asdict(self.request)
        metrics = summarise([event.metrics for event in events]) | plan.rows.left_out()
        return Manifest(
            policy_version=events[-1].step,
            parent=str(Path(self.request.parent).absolute()),
            parent_version=self.request.parent_version,
            parent_digest=self.parent_digest,
            request_digest=plan.identity,
            weights_digest="",
            lineage=settings.pop("lineage"),
            request=settings,
            result={"metrics": metrics, "seconds": dict(self.watch.seconds), "cpu_seconds": self._cpu_seconds()},
            created_at=time.time(),
            versions=library_versions(),
            dtype=str(state.dtype).removeprefix("torch."),
            files={},
            base_model=None if state.base_model is None else str(state.base_model),
            base_digest=state.base_digest,
            lora=settings["lora"],
        )

    def publish(self, target: Path, events: Sequence[StepEvent]) -> tuple[TrainResult, StateSaving | None]:
        """Publish the state as ``target``; the state then refers to ``target``. Every rank must call it.

        If the request saves the trainer state later, only the weights are written when this function returns; the
        second value of the result then writes the state in the background.
        """
        state, steps = self.state, [asdict(event) for event in events]
        hf = self.request.save_hf_checkpoint != "never"
        later = self.request.save_state == "later" and hf
        manifest, saving = self.manifest(events), None
        with self.watch.time("save"):
            due = not later or self._is_due(events[-1].step)
            draft = Draft.take(state, self.plan.position, self.ranks, hf=hf, copy=False, with_state=due)
            # If the disk is full, the state is saved now, so that this round reports the error.
            later = later and (not due or self._has_room(target, draft.nbytes))
            manifest = replace(manifest, deferred_state=later)
            at_once, rest = draft.split() if later else (draft, None)
            writing = Publication(target, at_once, self.ranks, manifest=manifest, steps=steps)
            writing.begin(background=rest is not None)
            try:
                rest = None if rest is None else rest.copied(self.ranks)  # while the weights are written
            finally:
                manifest = writing.finish()
            if rest is not None:
                saving = StateSaving(target, rest, self.ranks, with_state=due)
                saving.begin(background=True)
        state.folder, state.digest = target, manifest.state_digest
        state.weights_digest, state.policy_version = manifest.weights_digest, manifest.policy_version
        result = TrainResult(
            checkpoint=str(target),
            policy_version=manifest.policy_version,
            weights_digest=manifest.weights_digest,
            steps=len(events),
            **(manifest.result | {"seconds": dict(self.watch.seconds)}),
        )
        return result, saving

    def _has_room(self, target: Path, needed: int) -> bool:
        """Whether the disk of ``target`` has room for the ``needed`` bytes of all ranks. Rank 0's answer counts."""
        total = self.ranks.total(needed)
        existing = next(folder for folder in target.parents if folder.exists())
        return bool(self.ranks.from_first(lambda: shutil.disk_usage(existing).free > total))

    def _is_due(self, last_step: int) -> bool:
        """Whether the steps of this training contain a multiple of the saving interval."""
        interval = self.request.save_interval or 1
        return last_step // interval > self.request.counts_from // interval

    def without_steps(self) -> TrainResult:
        """Return the result for a plan without steps (no row has a gradient): the parent. Every rank must call it."""
        rows = np.arange(len(self.plan.rows.samples))
        metrics = row_metrics(self.plan.rows, rows, self.request.parent_version)
        return TrainResult(
            checkpoint=str(self.state.folder),
            policy_version=self.request.parent_version,
            weights_digest=self.state.weights_digest,
            steps=0,
            metrics=metrics | {"rows": float(len(rows))} | self.plan.rows.left_out(),
            seconds=self.watch.seconds,
            cpu_seconds=self._cpu_seconds(),
        )

    def _cpu_seconds(self) -> float:
        return self.ranks.total(time.process_time() - self.cpu_start)


def share_of_rank(rows: np.ndarray, group: np.ndarray, cost: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """This rank's part of a step's ``rows``: whole groups, balanced by ``cost`` (largest first, to the least loaded).

    ``group`` covers all rows; ``cost`` [len(rows)] covers those of the step, in any additive unit.
    """
    groups, member = np.unique(group[rows], return_inverse=True)
    weight = np.bincount(member, cost)
    load = np.zeros(world_size)
    owner = np.empty(len(groups), np.int64)
    for index in np.argsort(-weight, kind="stable"):
        owner[index] = load.argmin()
        load[owner[index]] += weight[index]
    return rows[owner[member] == rank]


def published_before(target: Path, manifest: Manifest, plan: TrainingPlan) -> TrainResult:
    """Return the result of the same training, which was published before, from its checkpoint ``target``."""
    return TrainResult(
        checkpoint=str(target),
        policy_version=manifest.policy_version,
        weights_digest=manifest.weights_digest,
        steps=len(plan.steps),
        reused=True,
        **manifest.result,
    )


def repeated_request(folder: Path, manifest: Manifest) -> TrainRequest:
    """The request that made checkpoint ``folder``, with the current paths of its files."""

    recorded = manifest.request

    def here(path: str) -> str:
        return str(from_manifest(path, recorded["output"], folder))

    one = {name: here(recorded[name]) for name in _FILES if recorded.get(name) is not None}
    many = {name: [here(file) for file in recorded[name]] for name in ("rollouts", "judged")}
    now = {"output": str(folder.parent), "save_interval": None, "lineage": manifest.lineage}
    return train_request(recorded | one | many | now)


def unsaved_until(folder: Path) -> list[str]:
    """Checkpoints whose trainings must be repeated for the state of ``folder``: oldest first, ``folder`` last.

    Raises DamagedError if the files of ``folder`` are not those that were published.
    """
    found: list[Path] = []
    place = folder
    while lacks_state(place):
        manifest = read_manifest(place)
        assert manifest is not None
        if not found:
            verify(place, manifest)
        remove_unfinished(place)
        found.append(place)
        place = Path(repeated_request(place, manifest).parent).absolute()
    return [str(each) for each in reversed(found)]


def steps_of(folder: Path) -> int:
    """The number of optimiser steps of the training that made checkpoint ``folder``."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.policy_version - repeated_request(folder, manifest).counts_from


def warn_if_different(state: TrainerState, folder: Path, ranks: Ranks) -> None:
    """Log the largest difference between the weights of a repeated training and the published weights.

    On a GPU the order of sums differs between runs, so the last bits of the weights differ too. Every rank must call
    it.
    """
    if state.lora is not None:
        return
    weights = gather_weights(state)
    if not ranks.is_first:
        return
    published = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
    both = weights.keys() & published.keys()
    found = [(weights[name].to(state.dtype).float() - published[name].float()).abs().max() for name in both]
    largest = max(map(float, found), default=0.0)
    if not largest <= 0.0:
        LOG.warning(
            "%s: weights of the repeated training differ from the published ones by up to %.2g", folder, largest
        )


def is_published(target: Path, identity: str, hf: bool) -> bool:
    """Whether ``target`` holds the checkpoint of this training, with Hugging Face weights if ``hf``."""
    try:
        manifest = read_manifest(target)
    except StorageError:
        return False  # the manifest cannot be read: the training replaces this checkpoint
    same = manifest is not None and manifest.request_digest == identity
    return same and (not hf or any(target.glob("*.safetensors")))
