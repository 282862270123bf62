"""Which files differ from the project's own records: the ledger of a round, the manifest of a checkpoint, a seal.

Rows and checkpoints are written once. A file whose record names another digest is damaged, and must not replace what is
stored of it.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rft_platform.common.errors import DamagedError
from rft_platform.common.files import SEAL, read_sealed_json
from rft_platform.object_store.scope import ROUNDS

#: Each has ``files``: names relative to the folder to which the record belongs, with their ``sha256``.
_RECORDS = ("files.json", "manifest.json", "trainer_state/saved.json")


def is_record(path: str) -> bool:
    """Whether a file is a JSON document of the platform: a note or ledger of a round, or one of ``_RECORDS``."""
    return (path.startswith(f"{ROUNDS}/r") and path.endswith(".json")) or f"/{path}".endswith(
        tuple(f"/{record}" for record in _RECORDS)
    )


class RecordedDigests:
    """The records in the home ``root``; each is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = dict[PurePosixPath, Mapping[str, Any] | None]()

    def contradict(self, path: str, sha256: str, stored: bool) -> bool:
        """Whether a record names another digest of the file ``path``, or the file is a record without its own digest.

        A file that no record names is never contradicted. ``stored``: the file is stored already; then a record that
        cannot be read counts as a contradiction, so that the stored copy is kept.
        """
        if is_record(path) and self._is_broken(path):
            return True
        for folder in PurePosixPath(path).parents:
            name = PurePosixPath(path).relative_to(folder).as_posix()
            for record in _RECORDS:
                listed = self._listed(folder / record)
                if listed is None and stored:
                    return True
                if (entry := (listed or {}).get(name)) is not None:
                    return bool(entry["sha256"] != sha256)
        return False

    def _is_broken(self, path: str) -> bool:
        try:
            content = json.loads((self._root / path).read_bytes())
            if isinstance(content, dict) and SEAL in content:
                read_sealed_json(self._root / path)
        except FileNotFoundError:
            return False
        except (ValueError, DamagedError):
            return True
        return False

    def _listed(self, record: PurePosixPath) -> Mapping[str, Any] | None:
        """The files that a record names; none without the record, None if it is broken."""
        if record not in self._files:
            try:
                self._files[record] = dict(read_sealed_json(self._root / record)["files"])
            except FileNotFoundError:
                self._files[record] = {}
            except (OSError, ValueError, KeyError, TypeError, DamagedError):  # its readers report the damage
                self._files[record] = None
        return self._files[record]
