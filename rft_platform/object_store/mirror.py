"""The copy of a home on an object store: what is uploaded with which commit, and what is fetched when.

The home stays the working copy of the one host that drives the project. A stage's rows and its note are stored by one
commit before the note exists here; checkpoints follow in the background. Rows and checkpoints that another home stored
are fetched when they are used first; everything else is fetched when a home takes the project over. A file that is
missing here stays stored: only ``removing`` removes it there.
"""

import hashlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, digest_file, read_json, write_json
from rft_platform.object_store import packs, row_ids
from rft_platform.object_store.commits import CommitLog, Committed, names_all
from rft_platform.object_store.driver_heartbeat import DriverHeartbeat
from rft_platform.object_store.home_state import HomeState, StateFile
from rft_platform.object_store.recorded_digests import RecordedDigests
from rft_platform.object_store.remote_files import RemoteFiles, StoredFile
from rft_platform.object_store.replaced_files import put_aside, restore_registry
from rft_platform.object_store.scope import (
    CHECKPOINTS,
    FOLDER,
    REGISTRY,
    ROUNDS,
    SCOPE,
    files_below,
    index_path,
    is_below,
    is_large,
    is_rollouts,
    is_small,
    is_weights,
    pack_kind,
    stamp_of,
)

LOG = logging.getLogger(__name__)
_GRACE_S = 3600.0  # a reader may still hold the name of a replaced file
_FETCH_S = 3600.0  # longest wait for another process that fetches checkpoints
#: Age from which an object that no commit names is removed. An upload ends, or fails, within hours; clocks differ less.
ORPHAN_GRACE_S = 86_400.0
_UPLOADS = "uploads"  # lock, shared by the processes that have objects which no commit names yet
_UPLOADS_S = 10.0  # longest wait of a clean-up for the uploads of other processes


class HomeMirror:
    """The copy of the home at ``root``, at the URL with which it was opened."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / FOLDER
        place = read_json(self._folder / "place.json")
        self.url: str = place["url"]
        self._changed, self._background = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._state = StateFile(self._folder)

    @cached_property
    def remote(self) -> RemoteFiles:
        """The store itself; made when it is needed first, because importing a client of S3 takes a second."""
        return RemoteFiles(self.url)

    def _log(self, home: str) -> CommitLog:
        return CommitLog(self.remote, home)

    @cached_property
    def _driver(self) -> DriverHeartbeat:
        return DriverHeartbeat(lambda: self.remote, lambda: self._state.known().home, self._holds_project)

    def _holds_project(self) -> bool:
        """Whether the newest commit is one of this home."""
        state = self._state.known()
        return self._log(state.home).newest_after(state.committed).home == state.home

    # --- from here to the store

    def commit(
        self,
        scope: Sequence[str] = SCOPE,
        documents: Mapping[str, str] | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        """Store what has changed below ``scope``, and ``documents``: texts by the path that they will have here.

        Files below ``scope`` that were removed by ``removing`` are dropped; other files that are missing here stay
        stored. Raises StoreTakenError if another home drives the project, TransientError if the store cannot be
        reached.
        """
        documents = documents or {}
        with locked(self._folder / _UPLOADS, _FETCH_S, shared=True):
            changes, stamps = self._uploaded(self._state.known(), scope, documents)
            with self._state.locked() as state:
                self._leave_out_changing(changes, stamps)
                due = [path for path in state.removed if is_below(path, scope)]
                gone = [path for path in due if path not in documents and self._is_gone(state, path)]
                changes |= dict.fromkeys(gone)
                self._commit(state, changes, grace_s)
                stamps = state.stamps | stamps
                state.stamps = {path: stamp for path, stamp in stamps.items() if path in state.committed.files}
                state.removed = {path: digest for path, digest in state.removed.items() if path not in due}

    def _leave_out_changing(self, changes: dict[str, StoredFile | None], stamps: dict[str, list[int]]) -> None:
        """Leave out files that were changed or removed since they were uploaded: a later commit stores them."""
        for path in [path for path, stamp in stamps.items() if stamp_of(self._root / path) != stamp]:
            if (file := changes.pop(path, None)) is not None:
                changes.pop(index_path(file.sha256), None)
            del stamps[path]

    def _is_gone(self, state: HomeState, path: str) -> bool:
        """Whether a removed file is as it was when it was removed: stored with the same content, and not here."""
        return _digest(state.committed.files.get(path)) == state.removed[path] and not (self._root / path).exists()

    def _commit(self, state: HomeState, changes: Mapping[str, StoredFile | None], grace_s: float) -> None:
        """Make uploaded changes part of the project, and remove objects that were replaced ``grace_s`` ago."""
        files, erase = state.committed.files, grace_s == 0.0
        without = {index_path(files[path].sha256) for path in changes if path in files and is_rollouts(path)}
        changes = {**dict.fromkeys(path for path in without if path in files), **changes}
        new = {path: file for path, file in changes.items() if not _same(files.get(path), file)}
        moved = self._merged(files, new, erase=erase) if erase or names_all(state.committed.number + 1) else {}
        if new or moved:
            current = {file.object for file in files.values()}
            self._log(state.home).commit(state.committed, new, moved)
            current -= {file.object for file in state.committed.files.values()}
            state.replaced += [(name, time.time()) for name in current]
        if state.home:
            self._remove_replaced(state, grace_s)

    def _merged(
        self, files: Mapping[str, StoredFile], new: Mapping[str, StoredFile | None], *, erase: bool
    ) -> dict[str, StoredFile]:
        """Upload the contents of small packs again as larger ones; the files that are in other objects then."""
        unchanged = {path: file for path, file in files.items() if path not in new}
        merged = packs.to_merge(unchanged.values(), erase=erase)
        moved = {path: file for path, file in unchanged.items() if file.object in merged}
        contents = {path: (self._content(path, file), file.sha256) for path, file in moved.items()}
        return self._pack(contents)

    def _content(self, path: str, file: StoredFile) -> bytes:
        """The content of a small stored file, from here if it is here and unchanged."""
        with suppress(FileNotFoundError):
            content = (self._root / path).read_bytes()
            if hashlib.sha256(content).hexdigest() == file.sha256:
                return content
        return self.remote.content(file)

    def _pack(self, contents: Mapping[str, tuple[bytes, str]]) -> dict[str, StoredFile]:
        """Upload small contents in packs; those that are fetched at different times in different ones."""
        files = dict[str, StoredFile]()
        for kind in sorted({pack_kind(path) for path in contents}):
            for name, content, placed in packs.packed({p: c for p, c in contents.items() if pack_kind(p) == kind}):
                self.remote.write(name, content)
                files |= placed
        return files

    def upload_later(self) -> None:
        """Store the checkpoints in a thread; ``finish`` waits for it, and stores what it could not."""
        self._changed.set()
        with self._background:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._upload_checkpoints, name="upload-checkpoints")
                self._thread.start()

    def finish(self) -> None:
        """Wait for the thread, and store everything that is not stored yet."""
        if self._thread is not None:
            self._thread.join()
        self.commit()

    def _upload_checkpoints(self) -> None:
        while self._changed.is_set():
            self._changed.clear()
            try:
                self._store_weights(CHECKPOINTS)  # first: an engine may wait for them
                self.commit([CHECKPOINTS])
            except Exception as error:
                LOG.warning("%s: checkpoints are not stored yet: %s", self.url, error)

    def weights(self, folder: Path) -> dict[str, StoredFile]:
        """What is stored of a checkpoint's weights, by the names in ``folder``; what is not stored yet is, first."""
        name = folder.relative_to(self._root).as_posix()
        self._store_weights(name)
        found = self._state.known().stored_below([name])
        return {path.removeprefix(f"{name}/"): file for path, file in found.items() if is_weights(path)}

    def _store_weights(self, folder: str) -> None:
        with locked(self._folder / "weights", _FETCH_S):  # otherwise two threads or processes upload the same files
            self.commit([path for path, _ in files_below(self._root, [folder]) if is_weights(path)])

    def _uploaded(
        self, state: HomeState, scope: Sequence[str], documents: Mapping[str, str]
    ) -> tuple[dict[str, StoredFile | None], dict[str, list[int]]]:
        """Upload ``documents`` and the changed files below ``scope``; returns what a commit of them changes, and the
        stamps of the files. A file that differs from the digest in its record is damaged, and is left out.
        """
        known, records = state.committed.files, RecordedDigests(self._root)
        changes, stamps = dict[str, StoredFile | None](), dict[str, list[int]]()
        small = {path: _with_digest(text.encode()) for path, text in documents.items()}
        for path, stamp in files_below(self._root, scope):
            if state.stamps.get(path) == stamp or path in documents:
                continue
            content = (self._root / path).read_bytes() if is_small(path, stamp[0]) else None
            digest = digest_file(self._root / path) if content is None else hashlib.sha256(content).hexdigest()
            if digest != _digest(known.get(path)) and records.contradict(path, digest, stored=path in known):
                LOG.warning("%s: differs from its record, and is not stored: `rft store check`", self._root / path)
                continue
            stamps[path] = stamp
            if content is not None:
                small[path] = content, digest
            elif digest != _digest(known.get(path)):
                changes[path] = StoredFile(self._new_object(path), stamp[0], digest)
        self.remote.upload({file.object: self._root / path for path, file in changes.items() if file is not None})
        small |= self._indices(changes)
        changes |= self._pack({path: each for path, each in small.items() if _digest(known.get(path)) != each[1]})
        return changes | self._replaced_checkpoints(state, changes), stamps

    def _replaced_checkpoints(self, state: HomeState, changes: Mapping[str, StoredFile | None]) -> dict[str, None]:
        """The stored files of checkpoints that were written again, as their new manifests show, without these files."""
        folders = [path.rpartition("/")[0] for path in changes if path.endswith("/manifest.json")]
        stored = state.stored_below(folders) if folders else {}
        return {path: None for path in stored if not (self._root / path).exists()}

    def _indices(self, changes: Mapping[str, StoredFile | None]) -> dict[str, tuple[bytes, str]]:
        """The indices of the row ids in the rollouts among ``changes``, with their digests; they are kept here too."""
        found = {}
        for path, file in changes.items():
            if file is not None and is_rollouts(path) and (index := row_ids.index_of(self._root / path)) is not None:
                with atomic_path(self._root / index_path(file.sha256), sync=False, sweep=False) as temporary:
                    temporary.write_bytes(index)
                found[index_path(file.sha256)] = _with_digest(index)
        return found

    def _new_object(self, path: str) -> str:
        """A name that no other upload has, so that nothing is written twice and a removal meets nothing new."""
        folder, _, name = path.rpartition("/")
        return f"files/{folder or 'home'}/{secrets.token_hex(8)}-{name}"

    def _remove_replaced(self, state: HomeState, grace_s: float) -> None:
        now = time.time()
        due = [name for name, since in state.replaced if now - since >= grace_s]
        for name in due:
            self.remote.remove(name)
        state.replaced = [(name, since) for name, since in state.replaced if name not in due]

    # --- from the store to here

    def take_over(self) -> None:
        """Make this home the one that drives the project, with the files that are stored.

        Raises the errors of ``bring`` and ``claim``.
        """
        self.bring()
        self.claim()

    def bring(self) -> None:
        """Bring the files here that are stored and missing, except those that are fetched when they are used.

        Files that another home has replaced or removed are moved to ``store/replaced``, and those that it has not.
        May be interrupted and repeated. Raises UserError if the driver of another home runs, if this home holds a
        project that is not stored there, or if the store has lost commits.
        """
        with self._state.locked() as state:
            newest = self._log(state.home).read()
            if newest.number and newest.home == state.claiming:
                state.home = state.claiming  # the process ended after its claim was stored
            self._refuse_unrelated(state, newest)
            if newest.number == 0 or newest.home == state.home:
                self._bring(state, newest, another=False)
                return
            self._driver.refuse_other()
            taking = secrets.token_hex(8)
            with DriverHeartbeat(lambda: self.remote, lambda: taking, lambda: True).running():
                self._bring(state, newest, another=True)

    def claim(self) -> None:
        """Make this home, with what ``bring`` brought, the one that drives the project.

        Raises StoreTakenError if another home has committed since.
        """
        with self._state.locked() as state:
            state.claiming = secrets.token_hex(8)
            self._state.save(state)
            self._log(state.claiming).claim(state.committed)
            state.home, state.claiming = state.claiming, ""
        self._driver.write(1)

    def _refuse_unrelated(self, state: HomeState, newest: Committed) -> None:
        known = state.committed.number
        own = newest.home == state.home
        if newest.number and not known and not own and any((self._root / ROUNDS).glob("r*/*.json")):
            raise UserError(
                f"store_url {self.url} holds a project already, and {self._root} another one: give another "
                "URL, or an empty RFT_HOME to continue the stored project"
            )
        if 0 < newest.number < known:
            raise UserError(
                f"store_url {self.url}: its newest commit is {newest.number}, and {self._root} knows commit {known}: "
                "the store is an older copy, or holds another project: empty the URL to store this home there again, "
                "or give an empty RFT_HOME to continue what is stored"
            )

    def _bring(self, state: HomeState, newest: Committed, *, another: bool) -> None:
        """``bring``, without its checks. ``another``: another home made the newest commit."""
        before, behind = state.committed, newest.number > state.committed.number
        if before.number > newest.number:
            LOG.warning("%s: has lost %d files: those that are here are stored again", self.url, len(before.files))
        unchanged = {path for path, file in newest.files.items() if _same(before.files.get(path), file)}
        state.stamps = {path: stamp for path, stamp in state.stamps.items() if path in unchanged}
        state.committed = newest
        if another:
            LOG.info("%s: takes over %d files of commit %d", self.url, len(newest.files), newest.number)
            state.home, state.removed = "", {}
            self._state.save(state)  # after a kill the next call continues
        if another or behind:
            put_aside(self._root, state, before.files, another=another)
        missing = self._lost(state)
        state.stamps |= self._download(newest, missing)
        if another or (behind and f"{REGISTRY}.backup" in missing):
            restore_registry(self._root, state)

    def _lost(self, state: HomeState) -> list[str]:
        """The stored files that every home has from its start, and that are missing here."""
        here = [path for path in state.committed.files if not is_large(path) and state.stored(path) is not None]
        return [path for path in here if not (self._root / path).exists()]

    def fetch_lost(self) -> None:
        """Bring the stored files here that every home has from its start, and that are missing here."""
        self.fetch([self._root / path for path in self._lost(self._state.known())])

    def fetch(self, paths: Iterable[Path]) -> None:
        """Bring the stored files among ``paths`` here that are missing; a folder stands for everything below it."""
        names = [path.relative_to(self._root).as_posix() for path in paths]
        if not names or not self._missing(self._state.known(), names):
            return
        with locked(self._folder / "fetch", _FETCH_S):  # once a host: other processes wait
            known = self._state.known()
            self._fetch(known.committed, self._missing(known, names))

    def _fetch(self, committed: Committed, paths: Sequence[str]) -> None:
        """Bring stored files here. Those that are removed meanwhile, by another process, are removed again."""
        stamps = self._download(committed, paths)
        with self._state.locked() as state:
            for path, stamp in stamps.items():
                file = committed.files[path]
                if _same(state.stored(path), file):
                    state.stamps[path] = stamp
                elif _has_digest(self._root / path, file.sha256):
                    (self._root / path).unlink()

    def _missing(self, state: HomeState, names: Sequence[str]) -> list[str]:
        """The stored files among ``names``, and below those that are folders, that are not here."""
        files = state.committed.files
        wanted = [name for name in names if state.stored(name) is not None]
        if folders := [name for name in names if name not in files and not (self._root / name).is_file()]:
            wanted += state.stored_below(folders)
        return [name for name in wanted if not (self._root / name).exists()]

    def restore(self, path: Path, sha256: str | None = None) -> bool:
        """Replace a damaged file, or the damaged files of a folder, by what is stored of them; False if nothing was.

        ``sha256``: the digest that the file must have. Raises TransientError if the store cannot be reached: what it
        holds is not given up for that.
        """
        state = self._state.known()
        files = state.stored_below([path.relative_to(self._root).as_posix()])
        wanted = [
            name
            for name, file in files.items()
            if sha256 in (None, file.sha256) and not _has_digest(self._root / name, file.sha256)
        ]
        try:
            with locked(self._folder / "fetch", _FETCH_S):
                self._fetch(state.committed, wanted)
        except StorageError as error:
            LOG.warning("%s: cannot be restored from the object store: %s", path, error)
            return False
        if wanted:
            LOG.warning("%s: restored from %s: %d damaged or missing files", path, self.url, len(wanted))
        return bool(wanted)

    @contextmanager
    def removing(self, paths: Iterable[Path]) -> Iterator[None]:
        """Remove files of the home during the block, and what is stored of them by the next commit.

        A folder stands for everything below it. The block must not fetch or store anything.
        """
        with self._state.removing([path.relative_to(self._root).as_posix() for path in paths]):
            yield

    def _download(self, committed: Committed, paths: Sequence[str]) -> dict[str, list[int]]:
        """Bring stored files here; returns their stamps."""
        # Manifests last: a checkpoint without its manifest is not taken for a complete one after a crash.
        manifests = [path for path in paths if path.endswith("/manifest.json")]
        for group in ([path for path in paths if path not in manifests], manifests):
            try:
                self.remote.download({self._root / path: committed.files[path] for path in group})
            except FileNotFoundError as error:
                raise StorageError(
                    f"{self.url}: an object of commit {committed.number} is missing ({error}): another home has "
                    "replaced it: start `rft run` again"
                ) from error
        found = ((path, stamp_of(self._root / path)) for path in paths)
        return {path: stamp for path, stamp in found if stamp is not None}

    def stored(self, path: Path) -> StoredFile | None:
        """What is stored of a file of the home, here or not; None: nothing."""
        return self._state.known().stored(path.relative_to(self._root).as_posix())

    def stored_below(self, folder: Path) -> list[Path]:
        """The stored files below a folder of the home, here or not."""
        return [
            self._root / name for name in self._state.known().stored_below([folder.relative_to(self._root).as_posix()])
        ]

    def readable(self, path: Path) -> str:
        """The file itself if it is here, otherwise the URL of its object, for DuckDB with ``remote.filesystem``."""
        stored = None if path.exists() else self.stored(path)
        return str(path) if stored is None else f"{self.url.rstrip('/')}/{stored.object}"

    def holding(self, paths: Sequence[Path], row_id: str) -> list[Path]:
        """Those among files of rollouts that may hold a row: all that are here, and those whose index names it."""
        known = self._state.known().committed.files
        away = {path: self.stored(path) for path in paths if not path.exists()}
        named = {path: index_path(file.sha256) for path, file in away.items() if file is not None}
        indices = {path: self._root / name for path, name in named.items() if name in known}
        self.fetch(indices.values())
        excluded = {path for path, index in indices.items() if not row_ids.may_hold(index.read_bytes(), row_id)}
        return [path for path in paths if path not in excluded]

    def remove_orphans(self, grace_s: float = ORPHAN_GRACE_S, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove the objects that uploads left behind which ended before their commit; their number and bytes.

        An object is removed if no commit names it and it was written ``grace_s`` ago (0: at any time). Objects of an
        upload that has not ended are kept: processes of this home hold a lock meanwhile, and a clean-up of this home
        has ended when another home has the newest commit.

        Raises UserError if the driver of another home runs, StoreTakenError if another home has continued the project,
        TransientError if a process of this home is uploading.
        """
        with locked(self._folder / _UPLOADS, _UPLOADS_S), self._state.locked() as state:
            found = self.remote.objects("files")  # before the commits are read: those name what is older
            self._driver.refuse_other()
            self._log(state.home).refuse_other(state.committed)
            kept = {file.object for file in state.committed.files.values()} | {name for name, _ in state.replaced}
            before = time.time() - grace_s if grace_s else math.inf
            orphans = [each for each in found if each.name not in kept and each.written_at <= before]
            for each in [] if dry_run else orphans:
                self.remote.remove(each.name)
        return len(orphans), sum(each.size for each in orphans)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Show other homes that this one drives the project during the block.

        If the block succeeds, store everything that is not stored yet.
        """
        with self._driver.running():
            yield
            self.finish()

    def driven_for(self, seconds: float) -> None:
        """Show other homes that this one drives the project, until ``seconds`` after the last call."""
        with self._background:
            driver = self._driver
        driver.beat_for(seconds)


def _same(known: StoredFile | None, new: StoredFile | None) -> bool:
    return known is new is None or (known is not None and new is not None and known.sha256 == new.sha256)


def _digest(known: StoredFile | None) -> str | None:
    return None if known is None else known.sha256


def _with_digest(content: bytes) -> tuple[bytes, str]:
    return content, hashlib.sha256(content).hexdigest()


def _has_digest(path: Path, sha256: str) -> bool:
    return path.is_file() and digest_file(path) == sha256


def store_changes(root: Path, *, erase: bool = False) -> None:
    """Store what a command has changed in the home at ``root``, if it has a copy. ``erase``: keep no old object."""
    if (mirror := mirror_of(root)) is None:
        return
    mirror.commit(grace_s=0.0 if erase else _GRACE_S)
    if erase:
        mirror.remove_orphans(0.0)


def open_mirror(root: Path, url: str) -> HomeMirror:
    """Give the home at ``root`` its copy at ``url``. Raises UserError if it has one at another URL."""
    place = root / FOLDER / "place.json"
    if not place.exists():
        write_json(place, {"url": url})
    mirror = mirror_of(root)
    assert mirror is not None
    if mirror.url != url:
        raise UserError(f"store_url {url}: this home is stored at {mirror.url}; give that URL, or another RFT_HOME")
    return mirror


def fetch_missing(path: Path) -> bool:
    """Bring a missing file of a home here, or what is missing of a folder; False if the home has no copy."""
    mirror = mirror_above(path.absolute())
    if mirror is not None:
        mirror.fetch([path.absolute()])
    return mirror is not None


def restore_stored(path: Path, sha256: str | None = None) -> bool:
    """``HomeMirror.restore`` for a file or folder of a home; False if the home has no copy."""
    mirror = mirror_above(path.absolute())
    return mirror is not None and mirror.restore(path.absolute(), sha256)


@contextmanager
def removing(*paths: Path) -> Iterator[None]:
    """``HomeMirror.removing`` for files and folders of one home; for a home without a copy only the block."""
    mirror = mirror_above(paths[0].absolute()) if paths else None
    with nullcontext() if mirror is None else mirror.removing([path.absolute() for path in paths]):
        yield


def mirror_above(path: Path) -> "HomeMirror | None":
    """The copy of the home that an absolute path is in; None if that home has none."""
    return next((mirror for parent in path.parents if (mirror := mirror_of(parent)) is not None), None)


_OPEN: dict[Path, HomeMirror] = {}


def mirror_of(root: Path) -> HomeMirror | None:
    """The copy of the home at ``root``; None for a home without one, which costs a single file system call."""
    if not (root / FOLDER / "place.json").exists():
        return None
    if root not in _OPEN:
        _OPEN.setdefault(root, HomeMirror(root))  # two sensors may tick at the same time
    return _OPEN[root]
