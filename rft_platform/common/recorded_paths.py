"""Paths in the records of a project: stored relative to its home, so that they stay valid in a copied or moved home.

``home`` is the absolute folder of the project's state (``RFT_HOME``). Records of earlier versions hold absolute paths.
"""

import os
from pathlib import Path

CHECKPOINT_PREFIX = "global_step_"
#: A folder that holds one of these is a home; a configuration may also be in the user's own folder.
_OF_A_HOME = ("rounds", "leases", "dagster")


def home_of(path: Path) -> Path | None:
    """The home that ``path`` lies in; None if it is in no home."""
    return next((folder for folder in path.parents if any((folder / name).exists() for name in _OF_A_HOME)), None)


def to_record(path: str | Path, home: Path) -> str:
    """``path`` as it is stored: relative to the home if both are moved together, otherwise unchanged.

    That is assumed if the path is below the home, or is a checkpoint in a folder that also contains the home.
    """
    place = Path(path)
    if place.is_relative_to(home):
        return place.relative_to(home).as_posix()
    if place.name.startswith(CHECKPOINT_PREFIX) and place.parent in home.parents:
        return os.path.relpath(place, home)
    return str(path)


def from_record(recorded: str, home: Path) -> Path:
    """The path that ``recorded`` stands for in this home.

    An absolute path below another home (one that was copied or moved to this place) is the path at the same position
    below this home. Other absolute paths are unchanged.
    """
    place = Path(recorded)
    if not place.is_absolute():
        return Path(os.path.normpath(home / place))
    return place if place.is_relative_to(home) else _below_another_home(place, home) or place


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


def _below_another_home(place: Path, home: Path) -> Path | None:
    """If ``place`` is in another home, the path at the same position below ``home``; otherwise None."""
    for depth in range(1, len(place.parts)):
        root, below = Path(*place.parts[:depth]), Path(*place.parts[depth:])
        if _exists(home / below):
            is_other = not place.exists() or any((root / name).exists() for name in _OF_A_HOME)
            return home / below if is_other and not _same(root, home) else None
    return None


def _exists(place: Path) -> bool:
    """Whether a file or folder exists. A checkpoint may have been removed: its parent folder counts."""
    return place.exists() or (place.name.startswith(CHECKPOINT_PREFIX) and place.parent.is_dir())


def _same(root: Path, home: Path) -> bool:
    """Whether both names lead to the same folder."""
    return root.exists() and home.exists() and root.samefile(home)
