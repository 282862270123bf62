"""The weights of a checkpoint for an engine on a machine that does not see the home.

The machine of the home names what is stored of the weights (``stored_weights``). The engine's machine fetches them
once, into a folder of the same path (``fetch_weights``). Credentials of the store come from each machine's environment.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import UserError
from rft_platform.common.files import atomic_path, read_json, write_json
from rft_platform.object_store.mirror import mirror_above
from rft_platform.object_store.remote_files import RemoteFiles, StoredFile

LOG = logging.getLogger(__name__)
_FETCHED = ".fetched"  # in a fetched folder: the digests of its files
_KEPT = 2  # fetched checkpoints of a policy: the served one, and the one to which an engine may return
_FETCH_S = 3600.0  # longest wait for another engine of the machine that fetches


def stored_weights(folder: Path) -> dict[str, Any] | None:
    """What ``fetch_weights`` needs on a machine that does not see ``folder``; None for a home without a copy.

    Stores first what is not stored yet of the weights.
    """
    if (mirror := mirror_above(folder)) is None:
        return None
    stored = mirror.weights(folder)
    return {"url": mirror.url, "files": {name: file.to_json() for name, file in stored.items()}}


def lacks_weights(folder: Path) -> bool:
    """Whether the home of ``folder`` is on another machine: there is no such folder, or this machine has fetched it."""
    return not folder.is_dir() or (folder / _FETCHED).exists()


def fetch_weights(folder: Path, stored: Mapping[str, Any]) -> None:
    """Fetch weights into ``folder``, unless it holds the same already; of the policy's others keep the newest.

    Raises UserError for names that leave the folder, and the errors of ``RemoteFiles``.
    """
    files = {name: StoredFile(**file) for name, file in stored["files"].items()}
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise UserError(f"weights of {folder}: {outside[0]!r} is no file of that folder")
    digests = {name: file.sha256 for name, file in files.items()}
    with locked(folder.parent / _FETCHED, _FETCH_S):  # once a machine: other engines wait
        if not lacks_weights(folder) or (folder.is_dir() and read_json(folder / _FETCHED) == digests):
            return
        with atomic_path(folder) as temporary:
            RemoteFiles(stored["url"]).download({temporary / name: file for name, file in files.items()})
            write_json(temporary / _FETCHED, digests)
        LOG.info("%s: fetched from %s", folder, stored["url"])
        _remove_older(folder.parent)


def _remove_older(parent: Path) -> None:
    fetched = sorted(parent.glob(f"*/{_FETCHED}"), key=lambda mark: mark.stat().st_mtime)
    for mark in fetched[:-_KEPT]:
        shutil.rmtree(mark.parent, ignore_errors=True)
