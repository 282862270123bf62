"""Publish the versions of a training host, for the host that serves them.

A record of a round has the notes that the serving host needs, and the folder of the weights. It is written after the
weights, and again when a note changes, for example when ``rft forget`` erases sequences of a canary check.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rft_platform.common.digests import THINNED
from rft_platform.common.errors import UserError
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.exchange.shared_place import SharedPlace, shared_place
from rft_platform.rounds.project.notes import EVALUATION, JUDGE, POLICY, START
from rft_platform.rounds.project.policy import Policy, published
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.reporting.servable_versions import is_released
from rft_platform.rounds.selection.production_rows import home_id

LOG = logging.getLogger(__name__)
OWNER = "home.json"  #: names the home that publishes
_STEP_S = 2.0
_NOT_SERVED = "trainer_state"


class VersionPublisher:
    """Publishes the versions of a project that this home trains."""

    def __init__(self, project: Project, place: SharedPlace) -> None:
        """Raises UserError if another home publishes there."""
        self._project = project
        self._place = place
        self._stamps: dict[int, list[int]] = {}  # of the notes of published rounds
        self._weights: dict[int, Path] = {}  # of published rounds
        owner, own = place.read(OWNER), home_id(project)
        if owner is None:
            place.write(OWNER, {"home": own, "project": project.config.project, "name": project.config.name})
        elif owner.get("home") != own:
            raise UserError(
                f"{place.url}: another home publishes its versions there: give this project another name, or another "
                "checkpoint_root_dir"
            )

    def step(self) -> None:
        """Publish the rounds whose records changed since the last call."""
        for number in self._project.store.rounds():
            stamp = self._stamp(number)
            if self._stamps.get(number) == stamp:
                continue
            policy = published(self._project.store, number)
            if policy is None or not (number == 0 or self._project.store.has_note(number, EVALUATION)):
                continue
            record = self._record(policy, number)
            self._publish(policy, number, record)
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
        """Times of the last changes of a round's notes, and of the folder of its weights."""
        folder = self._project.store.round_folder(number)
        files = [folder / f"{name}.json" for name in (START, JUDGE, POLICY, EVALUATION)]
        if number in self._weights:
            files.append(self._weights[number] / THINNED)
        return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]

    def _publish(self, policy: Policy, number: int, record: dict[str, Any]) -> None:
        name = f"{round_key(number)}.json"
        before = self._place.read(name)
        if before == record:
            return
        folder, kept = record["weights"]["folder"], record["weights"]["kept"]
        uploads = self._place.folder is None and folder is not None
        if uploads and kept and (before is None or before["weights"] != record["weights"]):
            self._place.upload(Path(policy.folder), folder, _NOT_SERVED)
        self._place.write(name, record)
        if uploads and not kept:
            self._place.remove(folder)

    def _record(self, policy: Policy, number: int) -> dict[str, Any]:
        """The record of a round. Its weights are None if they are those of the base model."""
        store, folder = self._project.store, Path(policy.folder)
        own = folder.is_relative_to(self._project.checkpoints)
        evaluation = store.read_note(number, EVALUATION) or {}
        judged = store.read_note(number, JUDGE) or {}
        start = store.read_note(number, START)
        policy_note = {**policy.to_note(self._project.home.root), "folder": "", "model_version": None}
        return {
            "home": home_id(self._project),
            "round": number,
            "weights": {
                "folder": folder.relative_to(self._project.checkpoints).as_posix() if own else None,
                "kept": not (folder / THINNED).exists(),
            },
            "notes": {
                **({} if start is None else {START: start}),
                JUDGE: {"mean_reward": judged.get("mean_reward")},
                POLICY: policy_note,
                EVALUATION: {**evaluation, "released": is_released(self._project, policy)},
            },
        }


@contextmanager
def publishing(project: Project) -> Iterator[None]:
    """Publish the project's versions in a thread during the block, if it trains for a service on another host."""
    place = shared_place(project) if project.config.mode == "train" else None
    if place is None:
        yield
        return
    publisher, stop = VersionPublisher(project, place), threading.Event()
    publisher.step()
    thread = threading.Thread(target=publisher.run, args=(stop,), name="publish", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_STEP_S)


def publish_now(project: Project) -> None:
    """Publish changed records at once, if the project trains for a service on another host."""
    place = shared_place(project) if project.config.mode == "train" else None
    if place is not None:
        VersionPublisher(project, place).step()
