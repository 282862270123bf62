"""Files of a home that are not those of the newest commit, which another home made: moved to ``store/replaced``."""

import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from rft_platform.common.files import atomic_path, digest_file
from rft_platform.object_store.home_state import HomeState
from rft_platform.object_store.remote_files import StoredFile
from rft_platform.object_store.scope import FOLDER, REGISTRY, SCOPE, files_below


def put_aside(root: Path, state: HomeState, before: Mapping[str, StoredFile], *, another: bool) -> None:
    """Move files of the home aside that differ from the newest commit, and find out which of them are stored.

    ``another``: another home made the commit. Otherwise files stay that this home has not stored yet: ``before`` are
    the files of the commit that it knew.
    """
    for path, stamp in dict(files_below(root, SCOPE)).items():
        stored = state.committed.files.get(path)
        known = state.stamps.pop(path, None) == stamp
        if known or (stored is not None and digest_file(root / path) == stored.sha256):
            state.stamps[path] = stamp
        elif another or stored is not None or path in before:
            _move(root, path, state.committed.number)


def restore_registry(root: Path, state: HomeState) -> None:
    """Replace MLflow's database by its stored copy, which is here."""
    for path in (REGISTRY, f"{REGISTRY}-wal", f"{REGISTRY}-shm"):
        if (root / path).exists():
            _move(root, path, state.committed.number)
    if f"{REGISTRY}.backup" in state.committed.files:
        with atomic_path(root / REGISTRY) as temporary:
            shutil.copyfile(root / f"{REGISTRY}.backup", temporary)


def _move(root: Path, path: str, number: int) -> None:
    folder = root / FOLDER / "replaced"
    places = (folder / (f"{number}.{again}" if again else str(number)) / path for again in count())
    target = next(place for place in places if not place.exists())
    target.parent.mkdir(parents=True, exist_ok=True)
    (root / path).rename(target)
