"""Publish a checkpoint atomically: in the foreground, or in a thread while training continues.

Rank 0 creates a temporary folder, and every rank writes its shards into it. Rank 0 writes the rest. When all shards are
there it writes the manifest and renames the folder. The ranks do not communicate while they write: each rank creates a
marker file beside its shards, so a thread can do all of the work. The ranks synchronise in ``finish``.
"""

import logging
import shutil
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rft_platform.common.errors import StorageError
from rft_platform.common.files import atomic_path, write_json
from rft_platform.training.checkpoint.content import Draft
from rft_platform.training.checkpoint.manifest import STEPS, Manifest, describe_files, write_manifest
from rft_platform.training.distributed import Ranks
from rft_platform.training.models.shards import TRAINER_STATE

LOG = logging.getLogger(__name__)
_POLL_S = 0.01  # polling interval for the other ranks' marker files


@dataclass(slots=True)
class Publication:
    """A checkpoint that is being written to ``folder``."""

    folder: Path
    draft: Draft
    manifest: Manifest  # its digests are empty before publication
    steps: list[dict[str, Any]]
    ranks: Ranks
    _temp: Path = field(init=False)
    _stack: ExitStack = field(default_factory=ExitStack)
    _thread: threading.Thread | None = None
    _ended: threading.Event = field(default_factory=threading.Event)  # this rank has written its shards, or has failed
    _released: threading.Event = field(default_factory=threading.Event)  # all ranks have ended: no rank writes any more
    _abort: threading.Event = field(default_factory=threading.Event)
    _error: Exception | None = None

    def start(self, *, background: bool) -> "Publication":
        """Start writing. With one rank and without ``background``, all is written on return. All ranks must call it."""
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
        """Wait for the publication and return the manifest. All ranks must call it, and all raise rank 0's error.

        Raises DiskFullError, or StorageError if another rank could not write its part.
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
        with ExitStack() as guard:  # from here on an error removes the folder
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
        except Exception as error:  # ``finish`` raises it on all ranks
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
            self._released.wait()  # other ranks may still write into the folder, which is removed next
            raise

    def _await_others(self) -> None:
        """Wait for the marker file of every other rank; remove the files."""
        for rank in range(1, self.ranks.world_size):
            mark = self._mark(rank)
            while not mark.exists():
                if self._abort.wait(_POLL_S):
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
    """Remove temporary folders of a trainer that was killed while it wrote this checkpoint."""
    for left in [*folder.parent.glob(f".{folder.name}.*.tmp"), *folder.parent.glob(f".{folder.name}.*.old")]:
        shutil.rmtree(left)
