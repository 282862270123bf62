"""Intermediate checkpoints of a training, and the search for the last one after the trainer was killed.

A thread writes them to ``<output>/intermediate/step_<n>``, one at a time, while the next steps run. They are removed
when the training publishes its final checkpoint, unless they hold Hugging Face weights on request
(``save_hf_checkpoint: always``): then the intermediate checkpoints of all trainings are kept. Those of an abandoned
training that this training replaces are always removed.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rft_platform.common.digests import first_damage
from rft_platform.common.errors import RftError, StorageError
from rft_platform.training.checkpoint.content import Draft
from rft_platform.training.checkpoint.manifest import Manifest, read_manifest
from rft_platform.training.checkpoint.reading import Position
from rft_platform.training.checkpoint.writing import Publication
from rft_platform.training.distributed import Ranks
from rft_platform.training.models.trainer_state import TrainerState
from rft_platform.training.protocol import StepEvent, TrainRequest

LOG = logging.getLogger(__name__)
FOLDER, PREFIX = "intermediate", "step_"


class PeriodicCheckpoints:
    """Saves a training every ``request.save_interval`` optimiser steps, counted from the start of the project.

    Use it as a context manager: at the end it waits for the running save, except after an error that other ranks may
    not have raised.
    """

    def __init__(self, request: TrainRequest, identity: str, ranks: Ranks) -> None:
        """``identity``: identity of the training (``TrainingPlan.identity``)."""
        self._request = request
        self._identity = identity
        self._ranks = ranks
        self._writing: Publication | None = None

    def __enter__(self) -> "PeriodicCheckpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None or issubclass(kind, RftError):  # an RftError is raised on all ranks
            self.wait()

    def is_due(self, step: int, remaining: int) -> bool:
        """Whether to save after global step ``step``, with ``remaining`` steps left; False after the last step."""
        interval = self._request.save_interval
        return interval is not None and remaining > 0 and step % interval == 0

    def save(
        self,
        state: TrainerState,
        position: Position | None,
        manifest: Callable[[Sequence[StepEvent]], Manifest],
        events: Sequence[StepEvent],
    ) -> None:
        """Start saving the state after ``events``; wait for the previous save first. Every rank must call it."""
        self.wait()
        hf = self._request.save_hf_checkpoint == "always"
        draft = Draft.take(state, position, self._ranks, hf=hf, copy=True)
        folder = _folder(Path(self._request.output)) / f"{PREFIX}{events[-1].step}"
        steps = [asdict(event) for event in events]
        writing = Publication(folder, draft, self._ranks, manifest=manifest(events), steps=steps)
        writing.begin(background=True)
        self._writing = writing  # only now: nothing ends a publication that could not begin

    def wait(self) -> None:
        """Wait for the running save and raise its error, if any. Every rank must call it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.finish()
            self._ranks.from_first(self._thin_out)

    def clear(self) -> None:
        """Remove the checkpoints that only served for resuming. Call it after the final checkpoint is published."""
        folder, always = _folder(Path(self._request.output)), self._request.save_hf_checkpoint == "always"
        if not self._ranks.is_first:
            return
        if always:
            self._without_abandoned()
        elif folder.is_dir():
            shutil.rmtree(folder)

    def _thin_out(self) -> None:
        """Remove old checkpoints. Keep the configured number of those with HF weights (None: all), else the newest."""
        request, found = self._request, self._without_abandoned()
        keep = (request.max_checkpoints_to_keep or 0) if request.save_hf_checkpoint == "always" else 1
        for old in found[keep:] if keep else []:
            shutil.rmtree(old)

    def _without_abandoned(self) -> list[Path]:
        """Remove the checkpoints of abandoned trainings; return the others, newest first."""
        found = _newest_first(Path(self._request.output))
        abandoned = {folder for folder in found if self._is_abandoned(folder)}
        for folder in abandoned:
            shutil.rmtree(folder)
        return [folder for folder in found if folder not in abandoned]

    def _is_abandoned(self, folder: Path) -> bool:
        """Whether ``folder`` belongs to an abandoned training that this one replaces.

        Without ``save_hf_checkpoint: always``, every checkpoint of another training is abandoned. With this setting,
        only checkpoints after the version that this training counts from are: earlier ones belong to finished
        trainings. A checkpoint that cannot be read does not count as abandoned.
        """
        request = self._request
        try:
            manifest = read_manifest(folder)
        except StorageError:
            return False
        if manifest is None or manifest.request_digest == self._identity:
            return False
        return request.save_hf_checkpoint != "always" or manifest.policy_version > request.counts_from


def latest(output: Path, identity: str) -> dict[str, Any] | None:
    """Return folder, digest and version (JSON) of the last intact intermediate checkpoint of training ``identity``."""
    for folder in _newest_first(output):
        try:
            manifest = read_manifest(folder)
        except StorageError as error:
            LOG.warning("checkpoint %s is skipped: %s", folder, error)
            continue
        if manifest is None or manifest.request_digest != identity:
            continue
        why = first_damage(folder, manifest.files)
        if why is None:
            return {"folder": str(folder), "digest": manifest.state_digest, "version": manifest.policy_version}
        LOG.warning("checkpoint %s is skipped: %s", folder, why)
    return None


def _folder(output: Path) -> Path:
    return output.absolute() / FOLDER


def _newest_first(output: Path) -> list[Path]:
    found = [path for path in _folder(output).glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)), reverse=True)
