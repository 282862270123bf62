"""Follow the versions that another host publishes: write their notes to this home, which only serves.

Everything that reads versions (deployments, releases, pages) then works as in a home that trains.
"""

import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import read_json, write_json
from rft_platform.config.home import Home
from rft_platform.rounds.exchange.publication import OWNER
from rft_platform.rounds.exchange.shared_place import SharedPlace
from rft_platform.rounds.project.notes import EVALUATION, POLICY
from rft_platform.rounds.project.policy import Policy
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.servable_versions import serving_policy
from rft_platform.rounds.selection.production_rows import home_id
from rft_platform.rounds.setup.connections import base_model_folder

LOG = logging.getLogger(__name__)


class VersionFollower:
    """Writes the notes of published versions to the project's home."""

    def __init__(self, project: Project, place: SharedPlace) -> None:
        self._project = project
        self._place = place
        self._marks: dict[str, str] = {}
        self.problem: str | None = None  #: why new versions cannot be read; None: the last look succeeded

    def step(self) -> None:
        """Take the records that changed since the last call, oldest round first."""
        owner = self._place.read(OWNER)
        if owner is None or owner["home"] == home_id(self._project):
            return  # nothing is published yet, or this home trains, too
        self._adopt(owner)
        for name, mark in self._place.marks().items():
            if name != OWNER and self._marks.get(name) != mark:
                record = self._place.read(name)
                if record is not None:
                    self._take(record)
                self._marks[name] = mark

    def run(self, stop: threading.Event) -> None:
        """Follow until ``stop`` is set, every ``explorer.service_status_check_interval`` seconds."""
        while True:
            try:
                self.step()
                self.problem = None
            except Exception as error:
                self.problem = f"new versions cannot be read from {self._place.url}: {error}"
                LOG.warning("%s", self.problem)
            if stop.wait(self._project.config.explorer.service_status_check_interval):
                return

    def _adopt(self, owner: dict[str, Any]) -> None:
        """Note which home this one follows. Raises UserError if this home has rounds of its own."""
        file = _marker(self._project.home)
        if file.exists():
            return
        if self._project.store.rounds():
            raise UserError(
                f"{self._project.home.root} holds rounds of its own, and {self._place.url} those of another home: "
                "point RFT_HOME at a new folder for this service"
            )
        write_json(file, {"home": owner["home"], "at": self._place.url})

    def _take(self, record: dict[str, Any]) -> None:
        """Write the notes of one record; the evaluation's note, which releases the version, is the last one."""
        number, notes = int(record["round"]), dict(record["notes"])
        policy = Policy.from_note({**notes.pop(POLICY), "folder": "."}, self._project.home.root)
        folder = self._weights(policy, record["weights"])
        notes = {POLICY: replace(policy, folder=str(folder)).to_note(self._project.home.root), **notes}
        notes[EVALUATION] = notes.pop(EVALUATION)
        store = self._project.store
        for name, note in notes.items():
            if store.read_note(number, name) != note:
                store.write_note(number, name, note)

    def _weights(self, policy: Policy, weights: dict[str, Any]) -> Path:
        """The folder of the weights on this host; weights in an object store are downloaded."""
        if weights["folder"] is None:
            return base_model_folder(self._project)
        if self._place.folder is not None:
            return self._place.folder / str(weights["folder"])
        folder = self._project.checkpoints / str(weights["folder"])
        serving = serving_policy(self._project)
        if weights["kept"] and not folder.exists():
            self._place.download(weights["folder"], folder)
        elif not weights["kept"] and (serving is None or serving.policy_version != policy.policy_version):
            shutil.rmtree(folder, ignore_errors=True)
        return folder


def followed_home(home: Home) -> str | None:
    """Where the versions of this home come from, if it serves versions that another home trains."""
    file = _marker(home)
    return str(read_json(file)["at"]) if file.exists() else None


def _marker(home: Home) -> Path:
    return home.root / "online" / "follows.json"
