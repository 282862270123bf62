"""What a home knows of its copy: the files of the newest commit, and which of its own files are stored.

Kept in ``store/state.json`` below the home, which its processes change one at a time.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rft_platform.cluster.local.locks import locked
from rft_platform.common.files import read_json, write_text
from rft_platform.object_store.commits import Committed
from rft_platform.object_store.remote_files import StoredFile


@dataclass(slots=True)
class HomeState:
    """What this home knows of the store."""

    committed: Committed = field(default_factory=Committed)
    stamps: dict[str, list[int]] = field(default_factory=dict)  # of files here that are stored: size, time of change
    replaced: list[tuple[str, float]] = field(default_factory=list)  # objects to remove, and since when


class StateFile:
    """The state of a home in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state.json"
        self._kept: tuple[list[int] | None, HomeState] | None = None

    @contextmanager
    def locked(self) -> Iterator[HomeState]:
        """The state, alone among the processes of this home; stored at the end, also after an error."""
        with locked(self._path):
            state = self._read()
            try:
                yield state
            finally:
                committed = state.committed
                files = {path: file.to_json() for path, file in committed.files.items()}
                document = {
                    "committed": {"number": committed.number, "home": committed.home, "files": files},
                    "stamps": state.stamps,
                    "replaced": state.replaced,
                }
                write_text(self._path, json.dumps(document))  # not indented: a large project has megabytes of it

    def known(self) -> HomeState:
        """The state, not to be changed; read again only when its file has changed."""
        stamp = stamp_of(self._path)
        if self._kept is None or self._kept[0] != stamp:
            self._kept = stamp, self._read()
        return self._kept[1]

    def _read(self) -> HomeState:
        try:
            found = read_json(self._path)
        except FileNotFoundError:
            return HomeState()
        committed = found["committed"]
        files = {path: StoredFile(**file) for path, file in committed["files"].items()}
        return HomeState(
            Committed(committed["number"], committed["home"], files),
            found["stamps"],
            [(name, since) for name, since in found["replaced"]],
        )


def stamp_of(path: Path) -> list[int] | None:
    """Size and time of change of a file; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
