"""Follow the versions that another host publishes: write their records to this home, which only serves.

Everything that reads versions (deployments, releases, pages) then works as in a home that trains.
"""

import logging
import shutil
import threading
from pathlib import Path

from rft_platform.common.digests import digest_once
from rft_platform.common.errors import UserError, some
from rft_platform.common.files import read_json, write_json
from rft_platform.config.home import Home
from rft_platform.experience.file_names import round_key
from rft_platform.online.releases.publication import OWNER
from rft_platform.online.releases.shared_place import (
    Owner,
    Record,
    RefusedDocumentError,
    SharedPlace,
    Weights,
    damage_of,
)
from rft_platform.online.traffic.project_traffic import home_id
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Part, Policy, Taken, read, write
from rft_platform.rounds.releases.released import serving_policy
from rft_platform.rounds.setup.connections import base_model_folder

LOG = logging.getLogger(__name__)


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
        """Note which home this one follows. Raises UserError if this home has rounds of its own or follows another."""
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
                f"{self._project.home.root} holds rounds of its own, and {self._place.url} those of another home: "
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
