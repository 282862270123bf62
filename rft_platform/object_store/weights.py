"""The weights of a checkpoint for an engine on a machine that does not see the home.

The machine of the home names what is stored of the weights (``stored_weights``). The engine's machine fetches them
once, into a folder of the same path (``fetch_weights``), and keeps those that an engine serves (``served_weights``).
Credentials of the store come from each machine's environment.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rft_platform.cluster.local.locks import locked, try_lock
from rft_platform.common.errors import DamagedError, FileSystemError, StorageError, UserError
from rft_platform.common.files import atomic_path, is_temporary, read_json, write_json
from rft_platform.object_store.mirror import mirror_above
from rft_platform.object_store.remote_files import RemoteFiles, StoredFile

_FETCHED = ".fetched"  # in a fetched folder: the digests of its files
_FETCH_S = 3600.0  # longest wait for another engine of the machine that fetches


def stored_weights(folder: Path) -> dict[str, Any] | None:
    """What ``fetch_weights`` needs on a machine that does not see ``folder``; None if it is in no home with a copy.

    Stores first what is not stored yet of the weights. Raises DamagedError if some of them cannot be stored.
    """
    if (mirror := mirror_above(folder)) is None:
        return None
    stored, here = (
        mirror.weights(folder),
        {file.relative_to(folder).as_posix() for file in folder.glob("*.safetensors")},
    )
    if absent := sorted(here - set(stored)):
        raise DamagedError(f"{folder / absent[0]}: differs from its record, and is not stored: `rft store check`")
    if not any(name.endswith(".safetensors") for name in stored):
        raise DamagedError(f"{folder}: {mirror.url} holds no weights of it: train the round again")
    return {"url": mirror.url, "files": {name: file.to_json() for name, file in stored.items()}}


def lacks_weights(folder: Path) -> bool:
    """Whether this machine has no such folder, or one that it has fetched and whose files may have changed since."""
    return not folder.is_dir() or (folder / _FETCHED).exists()


def fetch_weights(folder: Path, stored: Mapping[str, Any]) -> IO[str] | None:
    """Fetch weights into ``folder``, unless it holds the same already. Fetched folders that no engine serves go.

    Returns ``served_weights`` of the folder, so that it stays until an engine has loaded it.
    Raises UserError for names that leave the folder and for a path that cannot be written, DiskFullError, and
    StorageError if the store lacks a file.
    """
    files = {name: StoredFile(**file) for name, file in stored["files"].items()}
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise UserError(f"weights of {folder}: {outside[0]!r} is no file of that folder")
    digests = {name: file.sha256 for name, file in files.items()}
    with _explained(folder, stored["url"]), locked(folder.parent / _FETCHED, _FETCH_S):  # once a machine
        if lacks_weights(folder) and not (folder.is_dir() and read_json(folder / _FETCHED) == digests):
            _remove_unserved(folder)
            with atomic_path(folder, needs=sum(file.size for file in files.values())) as temporary:
                RemoteFiles(stored["url"]).download({temporary / name: file for name, file in files.items()})
                write_json(temporary / _FETCHED, digests)
        return served_weights(folder)


def served_weights(folder: Path) -> IO[str] | None:
    """A file that keeps the fetched ``folder`` on this machine until it is closed.

    None for other folders, and for one that another process removes at this moment.
    """
    try:
        mark = (folder / _FETCHED).open()
    except OSError:
        return None
    if try_lock(mark, shared=True):
        return mark
    mark.close()
    return None


@contextmanager
def _explained(folder: Path, url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(
            f"{folder}: this machine does not find an object of it in {url} ({error}): check the address and the keys "
            "of the store in the environment of the engine"
        ) from error
    except (PermissionError, NotADirectoryError, FileSystemError) as error:
        raise UserError(
            f"{folder}: this machine cannot write there ({error}): an engine that does not see the home fetches "
            "weights to the same path: make it writable"
        ) from error


def _remove_unserved(folder: Path) -> None:
    """Remove what earlier fetches have left beside ``folder``, except what an engine serves."""
    for mark in folder.parent.glob(f"*/{_FETCHED}"):
        with mark.open() as stream:
            if mark.parent != folder and try_lock(stream):
                shutil.rmtree(mark.parent, ignore_errors=True)
    for left in folder.parent.iterdir() if folder.parent.is_dir() else ():
        if is_temporary(left.name):  # of a fetch that was killed: this process holds the lock
            shutil.rmtree(left, ignore_errors=True)
