"""Whether the files of a checkpoint still are those that its manifest lists; neither torch nor MLflow is needed."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rft_platform.errors import DamagedError
from rft_platform.files import digest_file, read_sealed_json

MANIFEST = "manifest.json"
THINNED = "thinned.json"  # beside a manifest whose weights were removed to make room

Digest = Callable[[Path], str]


def checkpoint_damage(folder: Path, digest: Digest | None = digest_file) -> str | None:
    """What is wrong with the checkpoint in ``folder``, naming the file; None: every byte is what was written.

    A folder without a manifest is damaged too: ask only for checkpoints of this platform. Without ``digest`` only sizes
    are compared.
    """
    if not folder.is_dir():
        return "is missing"
    if (folder / THINNED).exists():
        return "its weights were removed to make room (trainer.max_checkpoints_to_keep)"
    path = folder / MANIFEST
    try:
        files = dict(read_sealed_json(path)["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except DamagedError:
        return f"{MANIFEST} was changed after it was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    return first_damage(folder, files, digest)


def first_damage(
    folder: Path, files: Mapping[str, Mapping[str, Any]], digest: Digest | None = digest_file
) -> str | None:
    """The first of ``files`` (name to size and sha256) that is not what was written, and why; None: all are."""
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{name} is {size:,} bytes long, {entry['size']:,} were written"
        if digest is not None and digest(path) != entry["sha256"]:
            return f"{name} holds other bytes than were written (sha256 differs from {MANIFEST})"
    return None


def digest_once(path: Path) -> str:
    """``digest_file``, read once a process for one path, time of change and size: for files that are only passed on."""
    stat = path.stat()
    return _digest_once(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _digest_once(path: Path, _changed_ns: int, _size: int) -> str:
    return digest_file(path)
