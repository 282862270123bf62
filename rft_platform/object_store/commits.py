"""The files of a project on an object store, as a sequence of numbered, create-only commit documents.

Invariants:

- ``commits/<number>.json`` is created once and never changed. The files of the project are those that the commits up to
  the highest number name; an object that no commit names is not part of the project.
- Of several writers one creates a number. A writer that finds the number taken by another home has lost the project.
- A home commits under an id that it got by its newest claim. A copy of a home has no id before it claims the project.
- Every ``EVERY``-th commit, and the first one of a home, names all files. ``newest.json`` gives the number of one of
  these; it may be old, never wrong: a reader continues from there, one number after the other.
"""

import json
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rft_platform.common.errors import DamagedError, StoreTakenError, TransientError
from rft_platform.common.files import SEAL, digest_json
from rft_platform.object_store.remote_files import RemoteFiles, StoredFile

EVERY = 50
NEWEST = "newest.json"
_FORMAT = 1
_AHEAD = 16  # commits that are requested at the same time
_READS = 6  # attempts to read a document that arrives truncated


@dataclass(slots=True)
class Committed:
    """The project's files by their path in the home, up to commit ``number``; 0: nothing is stored."""

    number: int = 0
    home: str = ""  # the home that made the commit
    files: dict[str, StoredFile] = field(default_factory=dict)

    def apply(self, document: Mapping[str, Any]) -> None:
        """Add the next commit."""
        if document["all"]:
            self.files = {}
        for path, file in document["files"].items():
            if file is None:
                self.files.pop(path, None)
            else:
                self.files[path] = StoredFile(**file)
        self.number, self.home = document["number"], document["home"]


class CommitLog:
    """The commits below a URL, read and written on behalf of ``home``."""

    def __init__(self, remote: RemoteFiles, home: str) -> None:
        self._remote = remote
        self._home = home

    def read(self) -> Committed:
        """The files of the newest commit."""
        found, newest = Committed(), self._document(NEWEST)
        if newest is not None:
            found.number = newest["number"] - 1
        self.follow(found)
        return found

    def follow(self, known: Committed) -> None:
        """Add the commits after ``known``: the next one, then several at a time."""
        ahead = 1
        with ThreadPoolExecutor(_AHEAD) as pool:
            while True:
                names = [_name(known.number + number) for number in range(1, ahead + 1)]
                for document in pool.map(self._document, names):
                    if document is None:
                        return
                    known.apply(document)
                ahead = _AHEAD

    def claim(self, known: Committed) -> None:
        """Make this home the one that commits; a home that committed before is refused from now on.

        Raises StoreTakenError if ``known`` is not the newest commit: another home has continued the project meanwhile.
        """
        if not self._create(known, {}, everything=True):
            raise self._taken(self.newest_after(known).number)

    def newest_after(self, known: Committed) -> Committed:
        """The files of the newest commit, given those of an earlier one, which stay as they are."""
        newest = Committed(known.number, known.home, dict(known.files))
        self.follow(newest)
        return newest

    def refuse_other(self, known: Committed) -> None:
        """Add the commits after ``known``. Raises StoreTakenError if the newest one is that of another home."""
        newest = self.newest_after(known)
        if not self._home:
            raise self._not_claimed()
        if newest.home != self._home:
            raise self._taken(newest.number)
        known.number, known.home, known.files = newest.number, newest.home, newest.files

    def _taken(self, number: int) -> StoreTakenError:
        return StoreTakenError(
            f"{self._remote.url}: another home has continued this project (commit {number}): this "
            "one stops, and nothing of it is lost that was stored before; to continue here, end the other "
            "driver and start `rft run` again"
        )

    def _not_claimed(self) -> StoreTakenError:
        return StoreTakenError(
            f"{self._remote.url}: this RFT_HOME has not claimed the project (it is a copy, was restored, or its start "
            "was interrupted), and nothing of it is stored: use the RFT_HOME that drives the project, or start "
            "`rft run` with this one to continue the project here"
        )

    def commit(
        self,
        known: Committed,
        changes: Mapping[str, StoredFile | None],
        moved: Mapping[str, StoredFile] | None = None,
    ) -> None:
        """Store the next commit and add it to ``known``.

        ``moved``: files of ``known`` whose contents are now in other objects. It is dropped if ``known`` is not the
        newest commit. Raises StoreTakenError if another home has committed since, or if this one has not claimed the
        project: the caller's files are not stored.
        """
        if not self._home:
            raise self._not_claimed()
        if known.home != self._home:
            raise self._taken(known.number)
        if moved and self._create(known, {**moved, **changes}, everything=names_all(known.number + 1)):
            return
        while not self._create(known, changes, everything=names_all(known.number + 1)):
            self.refuse_other(known)  # a commit of this home that it did not record, and maybe others after it

    def _create(self, known: Committed, changes: Mapping[str, StoredFile | None], *, everything: bool) -> bool:
        after = Committed(known.number, known.home, dict(known.files))
        document: dict[str, Any] = {
            "format": _FORMAT,
            "id": secrets.token_hex(16),
            "number": known.number + 1,
            "home": self._home,
            "at": time.time(),
            "all": False,
            "files": {path: None if file is None else file.to_json() for path, file in changes.items()},
        }
        after.apply(document)
        if everything:
            document |= {"all": True, "files": {path: file.to_json() for path, file in after.files.items()}}
        if not self._remote.create(_name(document["number"]), _sealed(document)):
            existing = self._document(_name(document["number"]))
            if existing is None or existing["id"] != document["id"]:  # not the answer to our own request that was lost
                return False
        known.number, known.home, known.files = after.number, after.home, after.files
        if everything:
            self._remote.write(NEWEST, _sealed({"format": _FORMAT, "number": document["number"]}))
        return True

    def _document(self, name: str) -> dict[str, Any] | None:
        """A document; None if there is none. One that arrives truncated is read again."""
        for attempt in range(_READS):
            if (content := self._remote.read(name)) is None:
                return None
            try:
                document: dict[str, Any] = json.loads(content)
                seal = document.pop(SEAL)
            except (ValueError, KeyError, AttributeError):
                time.sleep(0.05 * 2**attempt)
                continue
            if seal == digest_json(document) and document["format"] == _FORMAT:
                return document
            raise DamagedError(f"{self._remote.address(name)}: does not have its digest, or is of another version")
        raise TransientError(f"{self._remote.address(name)}: arrived truncated {_READS} times: check the store")


def names_all(number: int) -> bool:
    """Whether the commit names all files."""
    return number % EVERY == 0


def _name(number: int) -> str:
    return f"commits/{number:012d}.json"


def _sealed(document: Mapping[str, Any]) -> bytes:
    return json.dumps({**document, SEAL: digest_json(document)}).encode()
