"""Publish the versions of a host that trains, and follow them on the host that serves.

A published record has the parts of a round's record that the serving host needs, and names the files of the weights
with their digests. It is written after the weights, and again when a part changes, for example when ``rft forget``
erases sequences of a canary check. The serving host writes the records to its home: everything that reads versions
(deployments, releases, pages) then works as in a home that trains.
"""

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rft_platform.common.digests import MANIFEST, THINNED, digest_once
from rft_platform.common.errors import UserError, some
from rft_platform.common.files import read_json, read_sealed_json, write_json
from rft_platform.common.threads import repeating
from rft_platform.config.home import Home
from rft_platform.experience.file_names import round_key
from rft_platform.object_store.mirror import removing
from rft_platform.online.releases.shared_place import (
    Owner,
    Record,
    RefusedDocumentError,
    ServedFile,
    SharedPlace,
    Weights,
    damage_of,
    shared_place,
)
from rft_platform.online.traffic.project_traffic import home_id
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Judged,
    Part,
    Policy,
    RoundEvaluation,
    Start,
    Taken,
    published,
    read,
    write,
)
from rft_platform.rounds.releases.released import is_released, serving_policy
from rft_platform.rounds.setup.connections import base_model_folder

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
        self.url = place.url
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
    publisher = publisher_of(project)
    if publisher is None:
        yield
        return
    publisher.step()
    with repeating(publisher.step, _STEP_S, "publish", f"new versions cannot be published at {publisher.url}"):
        yield


def publisher_of(project: Project) -> VersionPublisher | None:
    """The publisher of a project that trains for a service on another host, else None.

    Raises UserError if the key is not set, or another home publishes at the shared place.
    """
    place = shared_place(project) if project.config.mode == "train" else None
    return None if place is None else VersionPublisher(project, place)


class VersionFollower:
    """Writes the records of published versions to the project's home."""

    def __init__(self, project: Project, place: SharedPlace) -> None:
        self._project = project
        self._place = place
        self._marks: dict[str, str] = {}  # of the records that were taken or refused
        self._problems: dict[str, str] = {}  # by record; "" for a problem with the place itself

    @property
    def problem(self) -> str | None:
        """Why the place or some of its records cannot be read; None if all were taken."""
        reasons = list(self._problems.values())
        return f"new versions cannot be read from {self._place.url}: {some(reasons)}" if reasons else None

    def step(self) -> None:
        """Take the records that changed since the last call, oldest round first.

        A record that is not valid is reported and left out until it changes; one that cannot be read is tried again.
        """
        owner = self._place.read(OWNER, Owner)
        if owner is None or owner.home == home_id(self._project):
            return  # nothing is published yet, or this home trains, too
        self._adopt(owner)
        marks = self._place.marks()
        for gone in self._problems.keys() - marks.keys() - {""}:
            del self._problems[gone]
        for name, mark in marks.items():
            if self._marks.get(name) == mark:
                continue
            try:
                self._take(name, owner)
                self._marks[name] = mark
                self._problems.pop(name, None)
            except Exception as error:
                self._report(name, f"{error or type(error).__name__}")
                if isinstance(error, RefusedDocumentError):
                    self._marks[name] = mark

    def run(self, stop: threading.Event) -> None:
        """Follow until ``stop`` is set, every ``explorer.service_status_check_interval`` seconds."""
        while True:
            try:
                self.step()
                self._problems.pop("", None)
            except Exception as error:
                self._report("", f"{error or type(error).__name__}")
            if stop.wait(self._project.config.explorer.service_status_check_interval):
                return

    def _report(self, name: str, problem: str) -> None:
        """Show a problem on the status page; log it once."""
        if self._problems.get(name) != problem:
            self._problems[name] = problem
            LOG.warning("a version cannot be read from %s: %s", self._place.url, problem)

    def _adopt(self, owner: Owner) -> None:
        """Note which home this one follows. Raises UserError if this home has its own rounds or follows another."""
        if owner.project != self._place.name:
            raise UserError(f"{OWNER}.json is of the project {owner.project}, not {self._place.name}")
        file = _marker(self._project.home)
        if file.exists():
            followed = read_json(file)["home"]
            if followed != owner.home:
                raise UserError(
                    f"{self._project.home.root} follows the home {followed}, and {owner.home} publishes there now: "
                    "point RFT_HOME at a new folder for this service"
                )
        elif self._project.store.rounds():
            raise UserError(
                f"{self._project.home.root} holds its own rounds, and {self._place.url} those of another home: "
                "point RFT_HOME at a new folder for this service"
            )
        else:
            write_json(file, {"home": owner.home, "at": self._place.url})

    def _take(self, name: str, owner: Owner) -> None:
        """Write the parts of one record; the evaluation, which releases the version, comes after the others."""
        record, store = self._place.read(name, Record), self._project.store
        if record is None:
            return
        if (record.home, record.project, round_key(record.round)) != (owner.home, owner.project, name):
            raise RefusedDocumentError(f"{name}.json: it is the record {round_key(record.round)} of {record.project}")
        known = read(store, record.round)
        newest = known.taken.revision if known.taken else 0
        if record.revision < newest:
            raise RefusedDocumentError(f"{name}.json: it was replaced by a newer record, which this home has taken")
        here = [known.start, known.judged, known.published(), known.evaluated, known.taken]
        for part in self._parts_of(record, is_new=record.revision > newest):
            if part not in here:
                write(store, record.round, part)

    def _parts_of(self, record: Record, is_new: bool) -> list[Part]:
        policy = Policy(
            folder=str(self._weights(record.weights, record.policy_version, is_new)),
            policy_version=record.policy_version,
            weights_digest=record.weights_digest,
            round=record.round,
            canary=record.canary,
        )
        start = [] if record.start is None else [record.start]
        judged = Judged(mean_reward=record.mean_reward)
        return [*start, judged, policy, record.evaluation, Taken(record.revision)]

    def _weights(self, weights: Weights, version: int, is_new: bool) -> Path:
        """The folder of the weights on this host; weights in an object store are downloaded.

        Raises RefusedDocumentError if the files are not those of the record. Those of a record that was taken before
        are only compared by size, because a digest reads all weights.
        """
        if weights.folder is None:
            return base_model_folder(self._project)
        place = self._place.folder
        folder = _inside(self._project.checkpoints if place is None else place, weights.folder)
        if weights.kept:
            damage = damage_of(folder, weights.files, digest_once if is_new else None)
            if damage is not None and place is not None:
                raise RefusedDocumentError(f"{folder}: {damage}")
            if damage is not None:
                self._place.download(weights.folder, weights.files, folder)
        elif place is None and not self._serves(version):
            with removing(folder):
                shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _serves(self, version: int) -> bool:
        serving = serving_policy(self._project)
        return serving is not None and serving.policy_version == version


def _inside(root: Path, name: str) -> Path:
    """The folder ``name`` below ``root``. Raises RefusedDocumentError if a link leads elsewhere."""
    folder = root / name
    if folder.resolve() != root.resolve() / name:
        raise RefusedDocumentError(f"{folder}: is a link, and leads to {folder.resolve()}")
    return folder


def followed_home(home: Home) -> str | None:
    """Where the versions of this home come from, if it serves versions that another home trains."""
    file = _marker(home)
    return str(read_json(file)["at"]) if file.exists() else None


def _marker(home: Home) -> Path:
    return home.root / "online" / "follows.json"
