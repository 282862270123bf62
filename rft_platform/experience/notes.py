"""Round folders and their notes: one small JSON document for each completed stage of a round."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rft_platform.common.errors import StorageError
from rft_platform.common.files import digest_file, read_sealed_json, sealed_json, write_sealed_json
from rft_platform.experience.file_names import is_round_key, round_key
from rft_platform.object_store.mirror import mirror_of, removing
from rft_platform.object_store.scope import ROUNDS, WITH_NOTES

ASIDE = "aside"
#: What to do with a broken file. A file that is only deleted comes back from the project's object store.
REPAIR = "`rft store check --set-aside` restores it from the store_url, or moves it away so that it is produced again"
_NOTE = re.compile(r"[a-z][a-z0-9_-]*")


class RoundNotes:
    """One folder per round below ``root``, and the notes in them."""

    def __init__(self, rounds: Path) -> None:
        self.root = Path(rounds)
        self._root = str(rounds)

    @property
    def home(self) -> Path:
        """The project's folder, ``RFT_HOME``: paths in notes are relative to it."""
        return self.root.parent

    def stored_size(self, path: Path) -> int | None:
        """Bytes of a file that is here, or on the project's object store; None if it is missing."""
        try:
            return path.stat().st_size
        except FileNotFoundError:
            mirror = mirror_of(self.home)
            stored = None if mirror is None else mirror.stored(path)
            return None if stored is None else stored.size

    def is_stored(self, path: Path) -> bool:
        """Whether a file is here, or on the project's object store."""
        return self.stored_size(path) is not None

    def stored_digest(self, path: Path) -> str | None:
        """SHA-256 of a file that is here, or as the project's object store records it; None if it is missing."""
        if path.is_file():
            return digest_file(path)
        mirror = mirror_of(self.home)
        stored = None if mirror is None else mirror.stored(path)
        return None if stored is None else stored.sha256

    def rounds(self) -> list[int]:
        """Numbers of the rounds that have a folder, ascending."""
        try:
            with os.scandir(self.root) as found:
                return sorted([int(e.name[1:]) for e in found if is_round_key(e.name) and e.is_dir()])
        except (FileNotFoundError, NotADirectoryError):
            return []

    def round_folder(self, round: int) -> Path:
        """Path of a round's folder, which may not exist."""
        return self.root / round_key(round)

    def write_note(self, round: int, name: str, value: Mapping[str, Any]) -> Path:
        """Write a small JSON document of a round, such as ``explore``, ``train`` or ``evaluation``.

        In a project with a ``store_url`` the note and the round's files are stored there first.
        """
        path = self._note_path(round, name)
        if (mirror := mirror_of(self.home)) is not None:
            inside = path.relative_to(self.home).as_posix()
            mirror.commit([f"{ROUNDS}/{round_key(round)}", *WITH_NOTES], {inside: sealed_json(value)})
            mirror.upload_later()
        write_sealed_json(path, value)
        return path

    def read_note(self, round: int, name: str) -> Any | None:
        """A note's value, or ``None`` if it was never written.

        Raises StorageError if it cannot be read, DamagedError if its content does not match its digest.
        """
        path = self._note_path(round, name)
        try:
            return read_sealed_json(path)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise StorageError(f"{path}: cannot be read ({error}): {REPAIR}") from error

    def has_note(self, round: int, name: str) -> bool:
        """Whether a note was written; costs a single file system call."""
        return os.path.exists(f"{self._root}/{round_key(round)}/{name}.json")  # noqa: PTH110 (called for every round)

    def notes(self, round: int) -> list[str]:
        """Names of a round's notes, in alphabetical order."""
        found = (path.stem for path in self.round_folder(round).glob("*.json"))
        return sorted(name for name in found if name != "files")

    def withdraw_note(self, round: int, name: str) -> Path | None:
        """Move a note to ``aside/``, so that its stage counts as not done. None if there was no note."""
        path = self._note_path(round, name)
        return move_aside(path, self.round_folder(round)) if self.is_stored(path) else None

    def _note_path(self, round: int, name: str) -> Path:
        if not _NOTE.fullmatch(name) or name == "files":
            raise ValueError(f"note name {name!r}: expected lower-case letters, digits, _ or -, as in 'explore'")
        return self.round_folder(round) / f"{name}.json"


def move_aside(path: Path, folder: Path) -> Path:
    """Move a file to ``folder/aside/`` under an unused name, if it exists; returns its new path.

    The next commit drops it from the project's object store.
    """
    target = free_name(folder / ASIDE / path.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with removing(path), suppress(FileNotFoundError):
        path.rename(target)
    return target


def free_name(wanted: Path) -> Path:
    """``wanted``, or the first of ``stem.1.suffix``, ``stem.2.suffix``, ... that does not exist."""
    number, path = 0, wanted
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.stem}.{number}{wanted.suffix}")
    return path
