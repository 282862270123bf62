"""Paths in the records of a project: stored relative to its home, so that they stay valid in a copied or moved home.

``home`` is the absolute folder of the project's state (``RFT_HOME``).
"""

import os
from pathlib import Path

CHECKPOINT_PREFIX = "global_step_"


def to_record(path: str | Path, home: Path) -> str:
    """``path`` as it is stored: relative to the home if both are moved together, otherwise unchanged.

    That is assumed if the path is below the home, or is a checkpoint in a folder that also contains the home. A link in
    one of the two paths makes no difference.
    """
    for place, root in ((Path(path), home), (Path(path).resolve(), home.resolve())):
        if place.is_relative_to(root):
            return place.relative_to(root).as_posix()
        if place.name.startswith(CHECKPOINT_PREFIX) and place.parent in root.parents:
            return os.path.relpath(place, root)
    return str(path)


def from_record(recorded: str, home: Path) -> Path:
    """The path that ``to_record`` stored as ``recorded``, in this home."""
    return Path(os.path.normpath(home / recorded))


def from_manifest(recorded: str, output: str | None, checkpoint: Path) -> Path:
    """The folder that the manifest of ``checkpoint`` names; ``output`` is the folder where the checkpoint was written.

    If ``output`` was copied or moved together with the named folder, this is the folder at the same position relative
    to ``checkpoint``, otherwise the recorded one.
    """
    place = Path(recorded)
    if output is None or not place.is_absolute():
        return place
    moved = Path(os.path.normpath(checkpoint.parent / os.path.relpath(place, output)))
    return moved if moved.exists() else place
