"""Which files of a home are stored, which of them in packs, and which are fetched only when they are used."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rft_platform.common.files import is_temporary
from rft_platform.object_store.packs import SMALL

FOLDER = "store"  #: below the home: where its copy is, and what is stored there
CHECKPOINTS, ROUNDS = "checkpoints", "rounds"
#: MLflow's database. It is not stored; its backup is.
REGISTRY = "mlflow/mlflow.db"
#: Everything that is stored. Databases, logs, leases and tokens belong to the host.
SCOPE = ("rft.yaml", "config_source", f"{REGISTRY}.backup", ROUNDS, "prompts", "imports", CHECKPOINTS)
#: Stored with every note, beside the round's own folder.
WITH_NOTES = ("rft.yaml", "config_source", f"{REGISTRY}.backup", f"{ROUNDS}/code", f"{ROUNDS}/r0000")
ROW_IDS = f"{FOLDER}/row_ids/"  # indices of files of rollouts, named by the digest of the file
#: Folders: damaged files, removed files, resuming on this host, unfinished files.
_NOT_STORED = {"aside", "discarded", "intermediate", ".saving"}

#: What only the trainer and the control plane read of a checkpoint: a folder, and files. The manifest makes a
#: checkpoint complete, so it is stored with the trainer's state.
_STATE, _NOT_SERVED = "trainer_state", ("manifest.json", "steps.json")


def files_below(root: Path, scope: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """The files of the home ``root`` below ``scope`` that are stored, with their stamps."""
    for name in scope:
        place = root / name
        if place.is_file() and (stamp := stamp_of(place)) is not None:
            yield name, stamp
        for folder, below, files in os.walk(place):
            below[:] = [each for each in below if each not in _NOT_STORED and not is_temporary(each)]
            for file in files:
                path = Path(folder) / file
                if file.endswith((".lock", ".sqlite")) or is_temporary(file) or (stamp := stamp_of(path)) is None:
                    continue
                yield path.relative_to(root).as_posix(), stamp


def stamp_of(path: Path) -> list[int] | None:
    """Size and time of change of a file; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]


def is_below(path: str, scope: Sequence[str]) -> bool:
    """Whether a file is one of ``scope``, or below one of its folders."""
    return any(path == name or path.startswith(f"{name}/") for name in scope)


def is_large(path: str) -> bool:
    """Whether a file is fetched when it is used: rows and their indices, and checkpoints without their manifests."""
    if path.startswith(f"{CHECKPOINTS}/"):
        return not path.endswith("/manifest.json")
    if not (path.startswith(f"{ROUNDS}/") and path.endswith(".parquet")):
        return path.startswith(ROW_IDS)
    folder, name = path.split("/")[-2:]
    return folder in ("rollouts", "judged") or name.startswith("row_selection-")


def is_weights(path: str) -> bool:
    """Whether a file belongs to what engines read of a checkpoint."""
    inside = path.split("/")
    return inside[0] == CHECKPOINTS and _STATE not in inside and inside[-1] not in _NOT_SERVED


def is_small(path: str, size: int) -> bool:
    """Whether a file is stored in a pack: documents of a round, such as notes, and small files of a checkpoint."""
    in_round = path.startswith(f"{ROUNDS}/") and path.endswith(".json")
    return size <= SMALL and (in_round or path.startswith(f"{CHECKPOINTS}/"))


def pack_kind(path: str) -> str:
    """Files of one kind are fetched at the same time: when a home takes over, with a checkpoint, or to find a row."""
    if not is_large(path):
        return "start"
    return "rows" if path.startswith(ROW_IDS) else "checkpoint"


def is_rollouts(path: str) -> bool:
    """Whether a file holds rows that are found by their ids."""
    return path.startswith(f"{ROUNDS}/") and path.endswith(".parquet") and path.split("/")[-2] == "rollouts"


def index_path(sha256: str) -> str:
    """The index of the row ids in the file with this digest."""
    return f"{ROW_IDS}{sha256}"
