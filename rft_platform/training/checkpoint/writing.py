"""Write checkpoints: publish a folder atomically, and save the trainer state into it, before or after publication.

``Publication`` makes the folder of a checkpoint: rank 0 creates a temporary folder, and every rank writes its shards
into it. Rank 0 writes the other files. When all shards are written, rank 0 writes the manifest and renames the folder.
``StateSaving`` adds the trainer state to a folder that was published without this state, while later rounds run.

The ranks do not communicate while they write, so a thread can write: each rank creates a marker file beside its shards
when they are complete. The ranks synchronise in ``end``.
"""

import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rft_platform.common.digests import SAVED_STATE
from rft_platform.common.errors import DiskFullError, StorageError
from rft_platform.common.files import (
    atomic_path,
    fsync,
    fsync_tree,
    is_disk_full,
    synced_while_written,
    write_json,
    write_sealed_json,
)
from rft_platform.training.checkpoint.content import Draft
from rft_platform.training.checkpoint.manifest import STEPS, Manifest, describe_files, write_manifest
from rft_platform.training.distributed import Ranks
from rft_platform.training.models.shards import TRAINER_STATE

LOG = logging.getLogger(__name__)
_POLL_S = 0.01  # polling interval for the other ranks' marker files
_UNFINISHED = ".saving"  # folder in ``trainer_state`` for files that are not complete


@dataclass(slots=True)
class _SharedWriting:
    """Files of checkpoint ``folder`` that all ranks write: each rank its shards, rank 0 also the other files."""

    folder: Path
    draft: Draft
    ranks: Ranks
    _shards: Path = field(init=False)  # folder into which every rank writes
    _stack: ExitStack = field(default_factory=ExitStack)
    _thread: threading.Thread | None = None
    _ended: threading.Event = field(default_factory=threading.Event)  # this rank has written its shards, or has failed
    _released: threading.Event = field(default_factory=threading.Event)  # all ranks have written their shards or failed
    _abort: threading.Event = field(default_factory=threading.Event)
    _error: Exception | None = None

    def begin(self, *, background: bool) -> None:
        """Start writing. With one rank and without ``background``, the files are complete on return.

        All ranks must call it.
        """
        self._shards = Path(self.ranks.from_first(self._open))
        if self.ranks.world_size == 1:
            self._released.set()
        if background or self.ranks.world_size > 1:
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    @property
    def failed(self) -> bool:
        """Whether this rank has failed so far; ``end`` raises the error."""
        return self._error is not None

    def end(self) -> None:
        """Wait until everything is written. All ranks must call it, and all raise rank 0's error.

        Raises DiskFullError, or StorageError if another rank could not write its part.
        """
        self._ended.wait()
        if self.ranks.largest(float(self._error is not None)):
            self._abort.set()
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        self.ranks.from_first(self._raise_error)

    def _open(self) -> str:
        """Rank 0: create the folder of the shards, and return it."""
        raise NotImplementedError

    def _lead(self) -> None:
        """Rank 0: write its shards, call ``_await_others``, and write the rest."""
        raise NotImplementedError

    def _write(self) -> None:
        try:
            if self.ranks.is_first:
                with self._stack:
                    self._lead_or_release()
            else:
                self.draft.write_shards(self._shards, self.ranks)
                self._mark(self.ranks.rank).touch()
        except Exception as error:  # ``end`` raises it on all ranks
            if not self.ranks.is_first:
                LOG.error("rank %d could not write its part of %s: %s", self.ranks.rank, self.folder, error)
            self._error = error
        finally:
            self._ended.set()

    def _lead_or_release(self) -> None:
        try:
            self._lead()
        except Exception as error:
            self._error = error
            self._ended.set()
            self._released.wait()  # other ranks may still write into the folder; afterwards the folder is removed
            raise

    def _await_others(self) -> None:
        """Wait for the marker file of every other rank; remove the marker files."""
        self._ended.set()
        for rank in range(1, self.ranks.world_size):
            mark = self._mark(rank)
            while not mark.exists():
                if self._abort.wait(_POLL_S):
                    raise StorageError(
                        f"{self.folder}: rank {rank} or another rank could not write its part of the checkpoint; the "
                        "trainer's log states the cause"
                    )
            mark.unlink()

    def _mark(self, rank: int) -> Path:
        return self._shards / f"rank-{rank}.written"

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(slots=True)
class Publication(_SharedWriting):
    """A checkpoint that is being written. The digests of ``manifest`` are empty before publication."""

    manifest: Manifest = field(kw_only=True)
    steps: list[dict[str, Any]] = field(kw_only=True)
    _temp: Path = field(init=False)

    def finish(self) -> Manifest:
        """Wait for the publication and return the manifest; see ``end``."""
        self.end()
        manifest = self.manifest
        written = self.ranks.from_first(lambda: {"files": manifest.files, "weights_digest": manifest.weights_digest})
        return replace(self.manifest, **written)

    def _open(self) -> str:
        remove_leftovers_of(self.folder)
        sync = not self.manifest.deferred_state  # otherwise ``StateSaving`` syncs the published files later
        temp = self._stack.enter_context(atomic_path(self.folder, needs=self.draft.nbytes, sync=sync))
        with ExitStack() as guard:  # from here on an error removes the folder
            guard.push(self._stack)
            self.draft.make_folders(temp / TRAINER_STATE)
            guard.pop_all()
        self._temp = temp
        return str(temp / TRAINER_STATE)

    def _lead(self) -> None:
        known = self.draft.write(self._temp, self._shards, self.ranks)
        write_json(self._temp / STEPS, self.steps)
        self._await_others()
        files = describe_files(self._temp, known)
        digest = self.draft.weights_digest(self._temp, files, self.ranks)
        self.manifest = replace(self.manifest, weights_digest=digest, files=files)
        write_manifest(self._temp, self.manifest)


@dataclass(slots=True)
class StateSaving(_SharedWriting):
    """Saves the trainer state of a checkpoint that was published without it, and syncs the published files.

    If the trainer is killed before the state is saved, the next trainer gets the state by repeating the training
    (``TrainingSession``).
    """

    with_state: bool = field(kw_only=True)  # False: only sync the published files

    def again(self) -> "StateSaving":
        """A new attempt to save the same state."""
        return StateSaving(self.folder, self.draft, self.ranks, with_state=self.with_state)

    def _open(self) -> str:
        shards = self.folder / TRAINER_STATE / _UNFINISHED
        with self._described_errors():
            remove_unfinished(self.folder)
            self.draft.make_folders(shards)
        self._stack.callback(shutil.rmtree, shards, ignore_errors=True)
        return str(shards)

    def _lead(self) -> None:
        with self._described_errors():
            with synced_while_written(self._shards) if self.ranks.world_size > 1 else nullcontext():
                known = self.draft.write(None, self._shards, self.ranks)
                self._await_others()
            fsync_tree(self.folder)
            fsync(self.folder.parent)
            if self.with_state:
                self._put_in_place(known)
        self.draft = replace(self.draft, shards={}, critic=None)  # free the copies

    @contextmanager
    def _described_errors(self) -> Iterator[None]:
        """Convert any error of the block to a StorageError, which does not end the trainer."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            if is_disk_full(error):
                needs = f"{self.draft.nbytes / 1e9:.1f} GB"
                raise DiskFullError(f"{self.folder}: no space for the trainer state, which needs {needs}") from error
            raise StorageError(f"{self.folder}: the trainer state cannot be saved: {error}") from error

    def _put_in_place(self, known: Mapping[Path, str]) -> None:
        files = describe_files(self._shards, known)
        for written in self._shards.iterdir():
            target = self._shards.parent / written.name
            if target.is_dir():
                shutil.rmtree(target)
            written.replace(target)
        named = {f"{TRAINER_STATE}/{name}": entry for name, entry in files.items()}
        write_sealed_json(self.folder / SAVED_STATE, {"files": named})


def remove_unfinished(folder: Path) -> None:
    """Remove the incomplete files of a trainer that was killed while it saved the state of checkpoint ``folder``."""
    left = folder / TRAINER_STATE / _UNFINISHED
    if left.exists():
        shutil.rmtree(left)


def remove_leftovers_of(folder: Path) -> None:
    """Remove temporary folders of a trainer that was killed while it wrote checkpoint ``folder``."""
    for left in [*folder.parent.glob(f".{folder.name}.*.tmp"), *folder.parent.glob(f".{folder.name}.*.old")]:
        shutil.rmtree(left)
