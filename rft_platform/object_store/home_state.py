"""What a home knows of its copy: the files of the newest commit, and which of its own files are stored.

Kept in ``store/state.json`` below the home, which its processes change one at a time. A file that is missing here is
lost, not removed: ``store/removed.json`` names the files that were removed on purpose. It is written before the first
of them is gone, and the next commit forgets those that are here all the same. So a kill at any point neither leaves the
object of a removed file nor removes that of a kept one.

The state belongs to one folder, which two files in ``store`` identify by their inode numbers. A folder that is moved on
its file system, mounted elsewhere or by several hosts has the same ones; a copy has others, and has not claimed the
project.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rft_platform.cluster.local.locks import lock_file, locked
from rft_platform.common.files import read_json, write_json, write_text
from rft_platform.object_store.commits import Committed
from rft_platform.object_store.remote_files import StoredFile
from rft_platform.object_store.scope import stamp_of


@dataclass(slots=True)
class HomeState:
    """What this home knows of the store."""

    home: str = ""  # the id under which this home commits; empty: it has not claimed the project
    claiming: str = ""  # the id of a claim whose end is not known
    committed: Committed = field(default_factory=Committed)
    stamps: dict[str, list[int]] = field(default_factory=dict)  # of files here that are stored: size, time of change
    replaced: list[tuple[str, float]] = field(default_factory=list)  # objects to remove, and since when
    removed: dict[str, str] = field(default_factory=dict)  # files that the next commit drops, and their digests

    def stored(self, path: str) -> StoredFile | None:
        """What is stored of a file; None for one that the next commit drops."""
        file = self.committed.files.get(path)
        return None if file is None or self.removed.get(path) == file.sha256 else file

    def stored_below(self, names: Sequence[str]) -> dict[str, StoredFile]:
        """The stored files among ``names``, and below those that are folders."""
        files, folders = self.committed.files, tuple(f"{name}/" for name in names if name not in self.committed.files)
        below = [path for path in files if path.startswith(folders)] if folders else []
        found = dict.fromkeys([*(name for name in names if name in files), *below])
        return {path: files[path] for path in found if self.stored(path) is not None}


class StateFile:
    """The state of a home in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._path, self._removed = folder / "state.json", folder / "removed.json"
        self._written_once = folder / "place.json", lock_file(self._path)
        self._kept: tuple[list[int] | None, HomeState] | None = None
        self._kept_removed: tuple[list[int] | None, dict[str, str]] | None = None

    @contextmanager
    def locked(self) -> Iterator[HomeState]:
        """The state, alone among the processes of this home; stored at the end, also after an error."""
        with locked(self._path):
            state = self._read()
            try:
                yield state
            finally:
                self.save(state)

    def save(self, state: HomeState) -> None:
        """Store the state. The caller holds its lock."""
        committed = state.committed
        files = {path: file.to_json() for path, file in committed.files.items()}
        document = {
            "home": state.home,
            "claiming": state.claiming,
            "inodes": self._inodes(),
            "committed": {"number": committed.number, "home": committed.home, "files": files},
            "stamps": state.stamps,
            "replaced": state.replaced,
        }
        write_text(self._path, json.dumps(document))  # not indented: a large project has megabytes of it
        if state.removed or self._removed.exists():
            write_json(self._removed, state.removed)

    @contextmanager
    def removing(self, names: Sequence[str]) -> Iterator[None]:
        """Record that the stored files among ``names``, and below them, are removed here during the block."""
        with locked(self._path):
            state = self.known()
            if found := state.stored_below(names):
                write_json(self._removed, state.removed | {path: file.sha256 for path, file in found.items()})
            yield

    def known(self) -> HomeState:
        """The state, not to be changed; read again only when its files have changed."""
        stamp, kept, removed = stamp_of(self._path), self._kept, self._kept_removed
        if kept is None or kept[0] != stamp:
            kept = self._kept = stamp, self._read()
        stamp = stamp_of(self._removed)
        if removed is None or removed[0] != stamp:
            removed = self._kept_removed = stamp, self._read_removed()
        return replace(kept[1], removed=removed[1])

    def _read_removed(self) -> dict[str, str]:
        try:
            found: dict[str, str] = read_json(self._removed)
        except FileNotFoundError:
            return {}
        return found

    def _read(self) -> HomeState:
        try:
            found = read_json(self._path)
        except FileNotFoundError:
            return HomeState()
        committed, inodes = found["committed"], self._inodes()
        claimed_here = found.get("inodes", inodes) == inodes  # without numbers it belongs to any folder
        files = {path: StoredFile(**file) for path, file in committed["files"].items()}
        return HomeState(
            found.get("home", committed["home"]) if claimed_here else "",
            found.get("claiming", "") if claimed_here else "",
            Committed(committed["number"], committed["home"], files),
            found["stamps"],
            [(name, since) for name, since in found["replaced"]],
            self._read_removed(),
        )

    def _inodes(self) -> list[int]:
        """Which folder this is: two numbers, because one may be the same in a copy on another file system."""
        return [path.stat().st_ino if path.exists() else 0 for path in self._written_once]
