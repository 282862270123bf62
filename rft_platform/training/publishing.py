"""Publishing a checkpoint, whole or not at all: at once, or by a thread while training goes on.

Rank 0 opens a temporary folder; every rank writes its shards into it; rank 0 writes the rest and, when all shards are
there, the manifest, and gives the folder its name. Nothing is said between ranks while they write: a rank leaves a mark
beside its shards, so that a thread can do all of it. The ranks meet again in ``finish``.
"""

import logging
import shutil
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rft_platform.errors import StorageError
from rft_platform.files import atomic_path, write_json
from rft_platform.training.draft import Draft
from rft_platform.training.manifest import STEPS, TRAINER_STATE, Manifest, describe_files, write_manifest
from rft_platform.training.ranks import Ranks

LOG = logging.getLogger(__name__)
_LOOK_S = 0.01  # between two looks for the other ranks' marks


@dataclass(slots=True)
class Publication:
    """One checkpoint on its way to ``folder``."""

    folder: Path
    draft: Draft
    manifest: Manifest  # its digests are empty until it is published
    steps: list[dict[str, Any]]
    ranks: Ranks
    _temp: Path = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack)
    _thread: threading.Thread | None = None
    _ended: threading.Event = field(default_factory=threading.Event)  # this rank has written its shards, or failed to
    _released: threading.Event = field(default_factory=threading.Event)  # all ranks have: nobody writes any more
    _abort: threading.Event = field(default_factory=threading.Event)
    _error: Exception | None = None

    def start(self, *, background: bool) -> "Publication":
        """Begin to write; without ``background`` a single rank has written everything on return. All ranks call it."""
        self._temp = Path(self.ranks.from_first(self._open))
        if self.ranks.world_size == 1:
            self._released.set()
        if background or self.ranks.world_size > 1:
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()
        return self

    def finish(self) -> Manifest:
        """Wait until the checkpoint is published; its manifest. All ranks call it, and all get rank 0's error.

        Raises DiskFullError, or StorageError where another rank could not write its part.
        """
        self._ended.wait()
        if self.ranks.largest(float(self._error is not None)):
            self._abort.set()
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        return replace(self.manifest, **self.ranks.from_first(self._result))

    def _open(self) -> str:
        remove_leftovers_of(self.folder)
        temp = self._stack.enter_context(atomic_path(self.folder, needs=self.draft.nbytes))
        with ExitStack() as guard:  # an error from here on removes the folder
            guard.push(self._stack)
            self.draft.make_folders(temp / TRAINER_STATE)
            guard.pop_all()
        return str(temp)

    def _write(self) -> None:
        try:
            if self.ranks.is_first:
                with self._stack:
                    self._lead()
            else:
                self.draft.write_shards(self._temp / TRAINER_STATE, self.ranks)
                self._mark(self.ranks.rank).touch()
        except Exception as error:  # told to all ranks by ``finish``
            if not self.ranks.is_first:
                LOG.error("rank %d could not write its part of %s: %s", self.ranks.rank, self.folder, error)
            self._error = error
        finally:
            self._ended.set()

    def _lead(self) -> None:
        trainer_state = self._temp / TRAINER_STATE
        try:
            self.draft.write_all(self._temp, trainer_state, self.ranks)
            write_json(self._temp / STEPS, self.steps)
            self._ended.set()
            self._await_others()
            files = describe_files(self._temp)
            digest = self.draft.weights_digest(self._temp, files, self.ranks)
            self.manifest = replace(self.manifest, weights_digest=digest, files=files)
            write_manifest(self._temp, self.manifest)
        except Exception as error:
            self._error = error
            self._ended.set()
            self._released.wait()  # others may still write into the folder that is about to be removed
            raise

    def _await_others(self) -> None:
        """Until every other rank's mark is there; the marks are removed."""
        for rank in range(1, self.ranks.world_size):
            mark = self._mark(rank)
            while not mark.exists():
                if self._abort.wait(_LOOK_S):
                    raise StorageError(
                        f"{self.folder}: rank {rank} or another could not write its part of the checkpoint; the "
                        "trainer's log says why"
                    )
            mark.unlink()

    def _mark(self, rank: int) -> Path:
        return self._temp / TRAINER_STATE / f"rank-{rank}.written"

    def _result(self) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        return {"files": self.manifest.files, "weights_digest": self.manifest.weights_digest}


def remove_leftovers_of(folder: Path) -> None:
    """What a trainer that was killed while it wrote this checkpoint left: nobody reads it, and it takes room."""
    for left in [*folder.parent.glob(f".{folder.name}.*.tmp"), *folder.parent.glob(f".{folder.name}.*.old")]:
        shutil.rmtree(left)
