"""Intermediate checkpoints of a training, and resuming from the last one after the trainer was killed.

They are stored in ``<output>/intermediate/step_<n>`` and written by a thread while the next steps run, one at a time.
They are removed when the training's own checkpoint is published, unless they hold Hugging Face weights on request
(``save_hf_checkpoint: always``). In that case those of earlier trainings are kept beside those of the present one.
Leftovers of an abandoned training that this training replaces are removed first, whatever their step numbers are.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rft_platform.checkpoint_files import first_damage
from rft_platform.errors import StorageError
from rft_platform.training.checkpoint import Position
from rft_platform.training.draft import Draft
from rft_platform.training.manifest import Manifest, read_manifest
from rft_platform.training.plan import TrainingPlan
from rft_platform.training.protocol import StepEvent
from rft_platform.training.publishing import Publication
from rft_platform.training.run_steps import StepRun

LOG = logging.getLogger(__name__)
FOLDER, PREFIX = "intermediate", "step_"
Describe = Callable[[Sequence[StepEvent]], Manifest]  # the manifest, without digests, of the state after these steps


@dataclass(slots=True)
class Intermediates:
    """Saves ``run`` every ``save_interval`` optimiser steps, counted from the start of the project."""

    run: StepRun
    describe: Describe
    _writing: Publication | None = None

    def after_step(self, events: Sequence[StepEvent]) -> None:
        """Start saving the state if a save is due; wait for the previous save first. Every rank must call it."""
        request, left = self.run.request, len(self.run.plan.steps) - len(events)
        if request.save_interval is None or not left or events[-1].step % request.save_interval:
            return
        with self.run.watch.time("save"):
            self.wait()
            position = position_after(self.run.plan, len(events))
            hf = request.save_hf_checkpoint == "always"
            draft = Draft.take(self.run.state, position, self.run.ranks, hf=hf, copy=True)
            folder = _folder(Path(request.output)) / f"{PREFIX}{events[-1].step}"
            manifest, steps = self.describe(events), [asdict(event) for event in events]
            self._writing = Publication(folder, draft, manifest, steps, self.run.ranks).start(background=True)

    def wait(self) -> None:
        """Wait for the running save and raise its error, if any. Every rank must call it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.finish()
            self.run.ranks.from_first(self._thin_out)

    def clear(self) -> None:
        """Remove checkpoints that only served for resuming, once the training's own checkpoint is published."""
        folder, always = _folder(Path(self.run.request.output)), self.run.request.save_hf_checkpoint == "always"
        if not self.run.ranks.is_first:
            return
        if always:
            self._without_abandoned()
        elif folder.is_dir():
            shutil.rmtree(folder)

    def _thin_out(self) -> None:
        """Remove old checkpoints. Keep the configured number of HF ones (None: all), else only the newest."""
        request, found = self.run.request, self._without_abandoned()
        keep = (request.max_checkpoints_to_keep or 0) if request.save_hf_checkpoint == "always" else 1
        for old in found[keep:] if keep else []:
            shutil.rmtree(old)

    def _without_abandoned(self) -> list[Path]:
        """Remove the checkpoints of abandoned trainings; return the others, newest first."""
        found = _newest_first(Path(self.run.request.output))
        abandoned = {folder for folder in found if self._is_abandoned(folder)}
        for folder in abandoned:
            shutil.rmtree(folder)
        return [folder for folder in found if folder not in abandoned]

    def _is_abandoned(self, folder: Path) -> bool:
        """Whether ``folder`` belongs to an abandoned training that this one replaces.

        Without ``save_hf_checkpoint: always``, any checkpoint of another training does. With it, only those beyond the
        parent's policy version do: earlier ones belong to finished trainings. An unreadable checkpoint is never
        removed.
        """
        request = self.run.request
        try:
            manifest = read_manifest(folder)
        except StorageError:
            return False
        if manifest is None or manifest.request_digest == self.run.plan.identity:
            return False
        return request.save_hf_checkpoint != "always" or manifest.policy_version > request.parent_version


def latest(output: Path, identity: str) -> dict[str, Any] | None:
    """Return folder, digest and version (JSON) of the last intact intermediate checkpoint of training ``identity``."""
    for folder in _newest_first(output):
        try:
            manifest = read_manifest(folder)
        except StorageError as error:
            LOG.warning("%s is passed over: %s", folder, error)
            continue
        if manifest is None or manifest.request_digest != identity:
            continue
        why = first_damage(folder, manifest.files)
        if why is None:
            return {"folder": str(folder), "digest": manifest.state_digest, "version": manifest.policy_version}
        LOG.warning("%s is passed over: %s", folder, why)
    return None


def position_after(plan: TrainingPlan, steps: int) -> Position | None:
    """Position in the demonstrations or pairs after the first ``steps`` steps of ``plan``."""
    if plan.position is None:
        return None
    return replace(plan.position, rows=plan.position.rows - sum(plan.taken[steps:]))


def _folder(output: Path) -> Path:
    return output.absolute() / FOLDER


def _newest_first(output: Path) -> list[Path]:
    found = [path for path in _folder(output).glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)), reverse=True)
