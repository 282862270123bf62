"""Publish the versions of a training host, for the host that serves them.

A published record has the parts of a round's record that the serving host needs, and names the files of the weights
with their digests. It is written after the weights, and again when a part changes, for example when ``rft forget``
erases sequences of a canary check.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rft_platform.common.digests import MANIFEST, THINNED, digest_once
from rft_platform.common.errors import UserError
from rft_platform.common.files import read_sealed_json
from rft_platform.experience.file_names import round_key
from rft_platform.online.releases.shared_place import (
    Owner,
    Record,
    RefusedDocumentError,
    ServedFile,
    SharedPlace,
    Weights,
    shared_place,
)
from rft_platform.online.traffic.project_traffic import home_id
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, Start, published, read
from rft_platform.rounds.releases.released import is_released

LOG = logging.getLogger(__name__)
OWNER = "home"  #: names the home that publishes
_STEP_S = 2.0
_NOT_SERVED = "trainer_state"


class VersionPublisher:
    """Publishes the versions of a project that this home trains."""

    def __init__(self, project: Project, place: SharedPlace) -> None:
        """Raises UserError if another home publishes there, or a home with another key."""
        self._project = project
        self._place = place
        self._stamps: dict[int, list[int]] = {}  # of the notes of published rounds
        self._weights: dict[int, Path] = {}  # of published rounds
        self._own = Owner(home=home_id(project), project=place.name)
        place.create(OWNER, self._own)
        self._check_owner()

    def _check_owner(self) -> None:
        try:
            owner = self._place.read(OWNER, Owner)
        except RefusedDocumentError as error:
            raise UserError(
                f"{self._place.url}/published/{error}. If no other host publishes there, remove this file"
            ) from error
        if owner != self._own:
            raise UserError(
                f"{self._place.url}: another home publishes its versions there: give this project another name, or "
                "another checkpoint_root_dir"
            )

    def step(self) -> None:
        """Publish the rounds whose records changed since the last call."""
        for number in self._project.store.rounds():
            stamp = self._stamp(number)
            if self._stamps.get(number) == stamp:
                continue
            policy = published(self._project.store, number)
            if policy is None or not (number == 0 or read(self._project.store, number).has(RoundEvaluation)):
                continue
            self._check_owner()
            self._publish(policy, self._record(policy, number))
            self._weights[number] = Path(policy.folder)
            self._stamps[number] = stamp

    def run(self, stop: threading.Event) -> None:
        """Publish until ``stop`` is set; a failure is logged and tried again."""
        wait = _STEP_S
        while not stop.wait(wait):
            try:
                self.step()
                wait = _STEP_S
            except Exception as error:
                wait = min(2 * wait, 60.0)
                LOG.warning("new versions cannot be published at %s and will be retried: %s", self._place.url, error)

    def _stamp(self, number: int) -> list[int]:
        """Times of the last changes of a round's record, and of the folder of its weights."""
        record = read(self._project.store, number)
        files = [record.file(part) for part in (Start, Judged, Policy, RoundEvaluation)]
        if number in self._weights:
            files.append(self._weights[number] / THINNED)
        return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]

    def _publish(self, policy: Policy, record: Record) -> None:
        name, weights = round_key(record.round), record.weights
        before = self._published_before(name)
        if before is not None and record == before.model_copy(update={"revision": record.revision}):
            return
        uploads = self._place.folder is None and weights.folder is not None
        if uploads and weights.kept and (before is None or before.weights != weights):
            self._place.upload(Path(policy.folder), str(weights.folder), list(weights.files))
        # a clock that was set back must not make the new record older than the one before
        revision = record.revision if before is None else max(record.revision, before.revision + 1)
        self._place.write(name, record.model_copy(update={"revision": revision}))
        if uploads and not weights.kept:
            self._place.remove(str(weights.folder))

    def _published_before(self, name: str) -> Record | None:
        """The record that this home has published; None also if another one was put in its place."""
        try:
            return self._place.read(name, Record)
        except RefusedDocumentError as error:
            LOG.warning("%s is published again: %s", self._place.url, error)
            return None

    def _record(self, policy: Policy, number: int) -> Record:
        """The record of a round."""
        record = read(self._project.store, number)
        return Record(
            **self._own.model_dump(),
            round=number,
            revision=time.time_ns(),
            policy_version=policy.policy_version,
            weights_digest=policy.weights_digest,
            weights=self._weights_of(Path(policy.folder)),
            canary=policy.canary,
            mean_reward=(record.judged or Judged()).mean_reward,
            start=record.start,
            evaluation=replace(record.evaluated or RoundEvaluation(), released=is_released(self._project, policy)),
        )

    def _weights_of(self, folder: Path) -> Weights:
        """Where the weights are. Those of the base model are not published: the serving host has them."""
        if not folder.is_relative_to(self._project.checkpoints):
            return Weights(folder=None, kept=True, files={})
        name = folder.relative_to(self._project.checkpoints).as_posix()
        kept = not (folder / THINNED).exists()
        return Weights(folder=name, kept=kept, files=_served_files(folder) if kept else {})


def _served_files(folder: Path) -> dict[str, ServedFile]:
    """The manifest of a checkpoint, and the files that it describes, without the trainer's state."""
    manifest = folder / MANIFEST
    described = {
        name: ServedFile(size=entry["size"], sha256=entry["sha256"])
        for name, entry in read_sealed_json(manifest)["files"].items()
        if not name.startswith(f"{_NOT_SERVED}/")
    }
    return {**described, MANIFEST: ServedFile(size=manifest.stat().st_size, sha256=digest_once(manifest))}


@contextmanager
def publishing(project: Project) -> Iterator[None]:
    """Publish the project's versions in a thread during the block, if it trains for a service on another host."""
    publisher, stop = publisher_of(project), threading.Event()
    if publisher is None:
        yield
        return
    publisher.step()
    thread = threading.Thread(target=publisher.run, args=(stop,), name="publish", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_STEP_S)


def publisher_of(project: Project) -> VersionPublisher | None:
    """The publisher of a project that trains for a service on another host, else None.

    Raises UserError if the key is not set, or another home publishes at the shared place.
    """
    place = shared_place(project) if project.config.mode == "train" else None
    return None if place is None else VersionPublisher(project, place)
