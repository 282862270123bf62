"""The copy of a home on an object store: what is uploaded with which commit, and what is fetched when.

The home stays the working copy of the one host that drives the project. A stage's rows and its note are stored by one
commit before the note exists here; checkpoints follow in the background. Rows and checkpoints that another home stored
are fetched when they are used first; everything else is fetched when a home takes the project over.
"""

import hashlib
import json
import logging
import math
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, digest_file, read_json, write_json
from rft_platform.object_store import packs, row_ids
from rft_platform.object_store.commits import CommitLog, Committed, names_all
from rft_platform.object_store.driver_sign import DriverSign
from rft_platform.object_store.home_state import HomeState, StateFile, stamp_of
from rft_platform.object_store.remote_files import RemoteFiles, StoredFile
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
    pack_kind,
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
        identity = [place["token"], socket.gethostname(), str(root.resolve())]  # a copied home is another one
        self._home = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self._changed, self._background = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._state = StateFile(self._folder)

    @cached_property
    def remote(self) -> RemoteFiles:
        """The store itself; made when it is needed first, because importing a client of S3 takes a second."""
        return RemoteFiles(self.url)

    @cached_property
    def _log(self) -> CommitLog:
        return CommitLog(self.remote, self._home)

    @cached_property
    def _driver(self) -> DriverSign:
        return DriverSign(self.remote, self._home)

    # --- from here to the store

    def commit(
        self,
        scope: Sequence[str] = SCOPE,
        documents: Mapping[str, str] | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        """Store what has changed below ``scope``, and ``documents``: texts by the path that they will have here.

        Raises StoreTakenError if another home drives the project, TransientError if the store cannot be reached.
        """
        with locked(self._folder / _UPLOADS, _FETCH_S, shared=True):
            changes, stamps = self._uploaded(self._state.known(), scope, documents or {})
            with self._state.locked() as state:
                self._commit(state, changes, grace_s)
                for path, stamp in stamps.items():
                    if stamp is None:
                        state.stamps.pop(path, None)
                    else:
                        state.stamps[path] = stamp

    def _commit(self, state: HomeState, changes: Mapping[str, StoredFile | None], grace_s: float) -> None:
        """Make uploaded changes part of the project, and remove objects that were replaced ``grace_s`` ago."""
        files, erase = state.committed.files, grace_s == 0.0
        new = {path: file for path, file in changes.items() if not _same(files.get(path), file)}
        moved = self._merged(files, new, erase=erase) if erase or names_all(state.committed.number + 1) else {}
        if new or moved:
            current = {file.object for file in files.values()}
            self._log.commit(state.committed, new, moved)
            current -= {file.object for file in state.committed.files.values()}
            state.replaced += [(name, time.time()) for name in current]
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
                self.commit([CHECKPOINTS])
            except Exception as error:
                LOG.warning("%s: checkpoints are not stored yet: %s", self.url, error)

    def _uploaded(
        self, state: HomeState, scope: Sequence[str], documents: Mapping[str, str]
    ) -> tuple[dict[str, StoredFile | None], dict[str, list[int] | None]]:
        """Upload ``documents`` and the changed files below ``scope``; returns what a commit of them changes, and the
        stamps of all files.
        """
        known, found = state.committed.files, dict(files_below(self._root, scope))
        changes, stamps = dict[str, StoredFile | None](), dict[str, list[int] | None]()
        small = {path: _with_digest(text.encode()) for path, text in documents.items()}
        for path, stamp in found.items():
            if state.stamps.get(path) == stamp or path in documents:
                continue
            stamps[path] = stamp
            place = self._root / path
            if is_small(path, stamp[0]):
                small[path] = _with_digest(place.read_bytes())
            elif (digest := digest_file(place)) != (known[path].sha256 if path in known else None):
                changes[path] = StoredFile(self._new_object(path), stamp[0], digest)
        self.remote.upload({file.object: self._root / path for path, file in changes.items() if file is not None})
        small |= self._indices(changes)
        changes |= self._pack({path: each for path, each in small.items() if _digest(known.get(path)) != each[1]})
        for path in [path for path, stamp in stamps.items() if stamp_of(self._root / path) != stamp]:
            if (file := changes.pop(path, None)) is not None:  # changed or removed meanwhile: a later commit stores it
                changes.pop(index_path(file.sha256), None)
            del stamps[path]
        for path in state.stamps:
            if path not in found and is_below(path, scope) and not (self._root / path).exists():
                changes[path] = stamps[path] = None
        without = {index_path(known[path].sha256) for path in changes if path in known and is_rollouts(path)}
        return {**{path: None for path in without if path in known}, **changes}, stamps

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

        Raises UserError if the driver of another home runs, or if this home holds a project that is not stored there.
        """
        with self._state.locked() as state:
            known = state.committed.number
            newest = self._log.read()
            if newest.number and newest.home != self._home:
                if not known and any((self._root / ROUNDS).glob("r*/*.json")):
                    raise UserError(
                        f"store_url {self.url} holds a project already, and {self._root} another one: give another "
                        "URL, or an empty RFT_HOME to continue the stored project"
                    )
                self._driver.refuse_other()
                self._bring(state, newest)
            state.committed = newest
            self._log.claim(state.committed)
            self._driver.show(1)

    def _bring(self, state: HomeState, newest: Committed) -> None:
        """Bring the files here that another home stored; files that it has not are moved to ``store/replaced``."""
        LOG.info("%s: takes over %d files of commit %d", self.url, len(newest.files), newest.number)
        state.stamps = {}
        for path, stamp in dict(files_below(self._root, SCOPE)).items():
            place, stored = self._root / path, newest.files.get(path)
            if stored is not None and digest_file(place) == stored.sha256:
                state.stamps[path] = stamp
            else:
                self._move_aside(path, newest.number)
        for path in (REGISTRY, f"{REGISTRY}-wal", f"{REGISTRY}-shm"):
            if (self._root / path).exists():
                self._move_aside(path, newest.number)
        wanted = [path for path in newest.files if path not in state.stamps and not is_large(path)]
        state.stamps |= self._download(newest, wanted)
        if f"{REGISTRY}.backup" in newest.files:
            with atomic_path(self._root / REGISTRY) as temporary:
                shutil.copyfile(self._root / f"{REGISTRY}.backup", temporary)

    def _move_aside(self, path: str, number: int) -> None:
        target = self._folder / "replaced" / str(number) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).rename(target)

    def fetch(self, paths: Iterable[Path]) -> None:
        """Bring the stored files among ``paths`` here that are missing; a folder stands for everything below it."""
        names = [path.relative_to(self._root).as_posix() for path in paths]
        if not names or not self._missing(names):
            return
        with locked(self._folder / "fetch", _FETCH_S):  # once a host: other processes wait
            wanted = self._missing(names)
            stamps = self._download(self._state.known().committed, wanted)
            with self._state.locked() as state:
                state.stamps |= stamps

    def _missing(self, names: Sequence[str]) -> list[str]:
        """The stored files among ``names``, and below those that are folders, that are not here."""
        state = self._state.known()
        files = state.committed.files
        wanted = [name for name in names if name in files]
        if folders := [name for name in names if name not in files and not (self._root / name).is_file()]:
            wanted += [path for path in files if is_below(path, folders) and path not in state.stamps]
        return [name for name in wanted if not (self._root / name).exists()]

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
        return self._state.known().committed.files.get(path.relative_to(self._root).as_posix())

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
            self._log.refuse_other(state.committed)
            kept = {file.object for file in state.committed.files.values()} | {name for name, _ in state.replaced}
            before = time.time() - grace_s if grace_s else math.inf
            orphans = [each for each in found if each.name not in kept and each.written_at <= before]
            for each in [] if dry_run else orphans:
                self.remote.remove(each.name)
        return len(orphans), sum(each.size for each in orphans)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Show other homes that this one drives the project during the block; at its end store everything."""
        with self._driver.running():
            yield
            self.finish()

    def driven_for(self, seconds: float) -> None:
        """Show other homes that this one drives the project, until ``seconds`` after the last call."""
        with self._background:
            driver = self._driver
        driver.give_for(seconds)


def _same(known: StoredFile | None, new: StoredFile | None) -> bool:
    return known is new is None or (known is not None and new is not None and known.sha256 == new.sha256)


def _digest(known: StoredFile | None) -> str | None:
    return None if known is None else known.sha256


def _with_digest(content: bytes) -> tuple[bytes, str]:
    return content, hashlib.sha256(content).hexdigest()


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
        write_json(place, {"url": url, "token": secrets.token_hex(16)})
    mirror = mirror_of(root)
    assert mirror is not None
    if mirror.url != url:
        raise UserError(f"store_url {url}: this home is stored at {mirror.url}; give that URL, or another RFT_HOME")
    return mirror


def fetch_missing(path: Path) -> bool:
    """Bring a missing file of a home here, or what is missing of a folder; False if the home has no copy."""
    for parent in path.absolute().parents:
        if (mirror := mirror_of(parent)) is not None:
            mirror.fetch([path.absolute()])
            return True
    return False


_OPEN: dict[Path, HomeMirror] = {}


def mirror_of(root: Path) -> HomeMirror | None:
    """The copy of the home at ``root``; None for a home without one, which costs a single file system call."""
    if not (root / FOLDER / "place.json").exists():
        return None
    if root not in _OPEN:
        _OPEN.setdefault(root, HomeMirror(root))  # two sensors may tick at the same time
    return _OPEN[root]
