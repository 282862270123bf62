"""The copy of a home on an object store: what is uploaded with which commit, and what is fetched when.

The home stays the working copy of the one host that drives the project. A stage's rows and its note are stored by one
commit before the note exists here; checkpoints follow in the background. Rows and checkpoints that another home stored
are fetched when they are used first; everything else is fetched when a home takes the project over.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, digest_file, is_temporary, read_json, write_json
from rft_platform.object_store.commits import CommitLog, Committed
from rft_platform.object_store.driver_sign import DriverSign
from rft_platform.object_store.remote_files import RemoteFiles, StoredFile

LOG = logging.getLogger(__name__)
FOLDER = "store"  #: below the home: where its copy is, and what is stored there
CHECKPOINTS, ROUNDS = "checkpoints", "rounds"
#: Everything that is stored. Databases, logs, leases and tokens belong to the host.
REGISTRY = "mlflow/mlflow.db"  # its copy is as new as the newest registered version, and not being written
SCOPE = ("rft.yaml", "config_source", f"{REGISTRY}.backup", ROUNDS, "prompts", "imports", CHECKPOINTS)
#: Stored with every note, beside the round's own folder.
WITH_NOTES = ("rft.yaml", "config_source", f"{REGISTRY}.backup", f"{ROUNDS}/code", f"{ROUNDS}/r0000")
_NOT_STORED = {"aside", "intermediate", ".saving"}  # folders: damaged files, resuming on this host, unfinished files
_GRACE_S = 3600.0  # a reader may still hold the name of a replaced file
_FETCH_S = 3600.0  # longest wait for another process that fetches checkpoints


@dataclass(slots=True)
class _State:
    """What this home knows of the store."""

    committed: Committed = field(default_factory=Committed)
    stamps: dict[str, list[int]] = field(default_factory=dict)  # of files here that are stored: size, time of change
    replaced: list[tuple[str, float]] = field(default_factory=list)  # objects to remove, and since when


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
        self._kept: tuple[list[int] | None, _State] | None = None

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
        state = self._known()
        changes, stamps = self._uploaded(state, scope)
        for path, text in (documents or {}).items():
            content = text.encode()
            file = StoredFile(self._new_object(path), len(content), hashlib.sha256(content).hexdigest())
            if (known := state.committed.files.get(path)) is None or known.sha256 != file.sha256:
                self.remote.write(file.object, content)
                changes[path] = file
        with self._locked() as state:
            new = {path: file for path, file in changes.items() if not _same(state.committed.files.get(path), file)}
            if new:
                current = {file.object for file in state.committed.files.values()}
                self._log.commit(state.committed, new)
                current -= {file.object for file in state.committed.files.values()}
                state.replaced += [(name, time.time()) for name in current]
            self._remove_replaced(state, grace_s)
            for path, stamp in stamps.items():
                if stamp is None:
                    state.stamps.pop(path, None)
                else:
                    state.stamps[path] = stamp

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
        self, state: _State, scope: Sequence[str]
    ) -> tuple[dict[str, StoredFile | None], dict[str, list[int] | None]]:
        """Upload the changed files below ``scope``; what a commit of them changes, and the stamps of all of them."""
        changes, stamps, uploads = dict[str, StoredFile | None](), dict[str, list[int] | None](), dict[str, Path]()
        found = dict(self._found(scope))
        for path, stamp in found.items():
            if state.stamps.get(path) == stamp:
                continue
            stamps[path] = stamp
            known, digest = state.committed.files.get(path), digest_file(self._root / path)
            if known is None or known.sha256 != digest:
                changes[path] = file = StoredFile(self._new_object(path), stamp[0], digest)
                uploads[file.object] = self._root / path
        self.remote.upload(uploads)
        for path in [path for path, stamp in stamps.items() if _stamp(self._root / path) != stamp]:
            changes.pop(path, None)  # changed or removed meanwhile: a later commit stores it
            del stamps[path]
        for path in state.stamps:
            if path not in found and _is_below(path, scope) and not (self._root / path).exists():
                changes[path] = stamps[path] = None
        return changes, stamps

    def _found(self, scope: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
        """The files below ``scope`` that are stored, with their stamps."""
        for name in scope:
            place = self._root / name
            if place.is_file() and (stamp := _stamp(place)) is not None:
                yield name, stamp
            for folder, below, files in os.walk(place):
                below[:] = [each for each in below if each not in _NOT_STORED and not is_temporary(each)]
                for file in files:
                    path = Path(folder) / file
                    if file.endswith((".lock", ".sqlite")) or is_temporary(file) or (stamp := _stamp(path)) is None:
                        continue
                    yield path.relative_to(self._root).as_posix(), stamp

    def _new_object(self, path: str) -> str:
        """A name that no other upload has, so that nothing is written twice and a removal meets nothing new."""
        folder, _, name = path.rpartition("/")
        return f"files/{folder or 'home'}/{secrets.token_hex(8)}-{name}"

    def _remove_replaced(self, state: _State, grace_s: float) -> None:
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
        with self._locked() as state:
            known = state.committed.number
            newest = self._log.read()
            if newest.number and newest.home != self._home:
                if not known and any((self._root / ROUNDS).glob("r*/*.json")):
                    raise UserError(
                        f"store_url {self.url} holds a project already, and {self._root} another one: give another "
                        "URL, or an empty RFT_HOME to continue the stored project"
                    )
                self._driver.refuse_other(newest.home)
                self._bring(state, newest)
            state.committed = newest
            self._log.claim(state.committed)
            self._driver.show(1)

    def _bring(self, state: _State, newest: Committed) -> None:
        """Bring the files here that another home stored; files that it has not are moved to ``store/replaced``."""
        LOG.info("%s: takes over %d files of commit %d", self.url, len(newest.files), newest.number)
        state.stamps = {}
        for path, stamp in dict(self._found(SCOPE)).items():
            place, stored = self._root / path, newest.files.get(path)
            if stored is not None and digest_file(place) == stored.sha256:
                state.stamps[path] = stamp
            else:
                self._move_aside(path, newest.number)
        for path in (REGISTRY, f"{REGISTRY}-wal", f"{REGISTRY}-shm"):
            if (self._root / path).exists():
                self._move_aside(path, newest.number)
        wanted = [path for path in newest.files if path not in state.stamps and not _is_large(path)]
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
            stamps = self._download(self._known().committed, wanted)
            with self._locked() as state:
                state.stamps |= stamps

    def _missing(self, names: Sequence[str]) -> list[str]:
        """The stored files among ``names``, and below those that are folders, that are not here."""
        state = self._known()
        files = state.committed.files
        wanted = [name for name in names if name in files]
        if folders := [name for name in names if name not in files and not (self._root / name).is_file()]:
            wanted += [path for path in files if _is_below(path, folders) and path not in state.stamps]
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
        found = ((path, _stamp(self._root / path)) for path in paths)
        return {path: stamp for path, stamp in found if stamp is not None}

    def stored(self, path: Path) -> StoredFile | None:
        """What is stored of a file of the home, here or not; None: nothing."""
        return self._known().committed.files.get(path.relative_to(self._root).as_posix())

    def readable(self, path: Path) -> str:
        """The file itself if it is here, otherwise the URL of its object, for DuckDB with ``remote.filesystem``."""
        stored = None if path.exists() else self.stored(path)
        return str(path) if stored is None else f"{self.url.rstrip('/')}/{stored.object}"

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Show other homes that this one drives the project during the block; at its end store everything."""
        with self._driver.running():
            yield
            self.finish()

    # --- what this home knows

    @contextmanager
    def _locked(self) -> Iterator[_State]:
        """The state, alone among the processes of this home; stored at the end, also after an error."""
        with locked(self._folder / "state.json"):
            state = self._read()
            try:
                yield state
            finally:
                write_json(
                    self._folder / "state.json",
                    {"committed": asdict(state.committed), "stamps": state.stamps, "replaced": state.replaced},
                )

    def _known(self) -> _State:
        """The state, not to be changed; read again only when its file has changed."""
        stamp = _stamp(self._folder / "state.json")
        if self._kept is None or self._kept[0] != stamp:
            self._kept = stamp, self._read()
        return self._kept[1]

    def _read(self) -> _State:
        try:
            found = read_json(self._folder / "state.json")
        except FileNotFoundError:
            return _State()
        committed = found["committed"]
        files = {path: StoredFile(**file) for path, file in committed["files"].items()}
        return _State(
            Committed(committed["number"], committed["home"], files),
            found["stamps"],
            [(name, since) for name, since in found["replaced"]],
        )


def _stamp(path: Path) -> list[int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _same(known: StoredFile | None, new: StoredFile | None) -> bool:
    return known is new is None or (known is not None and new is not None and known.sha256 == new.sha256)


def _is_below(path: str, scope: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}/") for name in scope)


def _is_large(path: str) -> bool:
    """Whether a file is fetched when it is used: rows, and checkpoints without their manifests."""
    if path.startswith(f"{CHECKPOINTS}/"):
        return not path.endswith("/manifest.json")
    return path.endswith(".parquet") and path.split("/")[-2] in ("rollouts", "judged")


def store_changes(root: Path, *, erase: bool = False) -> None:
    """Store what a command has changed in the home at ``root``, if it has a copy. ``erase``: keep no old object."""
    if (mirror := mirror_of(root)) is not None:
        mirror.commit(grace_s=0.0 if erase else _GRACE_S)


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
        _OPEN[root] = HomeMirror(root)
    return _OPEN[root]
