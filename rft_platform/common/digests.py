"""Digests of checkpoints: verify files against the manifest, and identify a set of weights.

The digest of the weights is their identity in the trainer, the engine and the registry. This module needs neither torch
nor MLflow.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from rft_platform.common.errors import DamagedError, UserError
from rft_platform.common.files import digest_file, digest_json, read_json, read_sealed_json

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"  # names the file of each tensor of weights in several files
THINNED = "thinned.json"  # marks a checkpoint whose weights were removed to free space
#: Lists the files of a trainer state that was saved after its checkpoint was published; written when they are complete.
SAVED_STATE = "trainer_state/saved.json"

Digest = Callable[[Path], str]


def checkpoint_damage(folder: Path, digest: Digest | None = digest_file) -> str | None:
    """Describe the damage of the checkpoint in ``folder``, naming the file; None if every byte is as written.

    A folder without a manifest counts as damaged, so call this only for checkpoints of this platform. Without
    ``digest`` only sizes are compared.
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
    return first_damage(folder, files, digest) or saved_state_damage(folder, digest)


def saved_state(folder: Path) -> dict[str, Any] | None:
    """Files (name to size and sha256) of the trainer state that was saved after the checkpoint; None without one."""
    path = folder / SAVED_STATE
    return dict(read_sealed_json(path)["files"]) if path.exists() else None


def defers_state(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint that was published without its trainer state, which may be saved later."""
    try:
        return bool(read_sealed_json(folder / MANIFEST).get("deferred_state"))
    except (OSError, ValueError, DamagedError):
        return False  # not a checkpoint, or a damaged one: its readers report the damage


def lacks_state(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint whose trainer state is not saved; repeating its training makes the state."""
    return defers_state(folder) and not (folder / SAVED_STATE).exists()


def saved_state_damage(folder: Path, digest: Digest | None = digest_file) -> str | None:
    """Describe the damage of a trainer state that was saved after its checkpoint; None if it is whole or not saved."""
    try:
        return first_damage(folder, saved_state(folder) or {}, digest)
    except (OSError, ValueError, KeyError, TypeError, DamagedError) as error:
        return f"{SAVED_STATE} cannot be read ({type(error).__name__}: {error})"


def first_damage(
    folder: Path, files: Mapping[str, Mapping[str, Any]], digest: Digest | None = digest_file
) -> str | None:
    """Describe the first damaged file of ``files`` (name to size and sha256); None if all files are as written."""
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{name} is {size:,} bytes long, {entry['size']:,} were written"
        if digest is not None and digest(path) != entry["sha256"]:
            return f"{name} was changed after it was written (sha256 differs from {MANIFEST})"
    return None


def digest_once(path: Path) -> str:
    """``digest_file``, cached per process by path, mtime and size; for files that are only passed on."""
    stat = path.stat()
    return _digest_once(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _digest_once(path: Path, _changed_ns: int, _size: int) -> str:
    return digest_file(path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads from a model folder or an adapter's folder, sorted by name.

    Other files may hold the same weights once more, as ``consolidated.safetensors`` of Mistral's models does. Without
    ``model.safetensors``, an index or ``adapter_model.safetensors`` these are all safetensors files.
    """
    adapter = (folder / "adapter_config.json").exists()
    single = folder / ("adapter_model.safetensors" if adapter else "model.safetensors")
    if single.exists():
        return [single]
    every = sorted(folder.glob("*.safetensors"))
    try:
        listed = set(read_json(folder / INDEX)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return every
    return [file for file in every if file.name in listed]


def digest_weights(folder: Path, digest: Callable[[Path], str] = digest_file) -> str:
    """SHA-256 of a model folder's safetensors: of the only file, or of the names and digests of several files."""
    files = weight_files(folder)
    if not files:
        raise UserError(
            f"model folder {folder}: contains no .safetensors file; convert the weights to safetensors first"
        )
    if len(files) == 1:
        return digest(files[0])
    with ThreadPoolExecutor(min(8, len(files))) as pool:
        return digest_json(dict(zip([file.name for file in files], pool.map(digest, files), strict=True)))
