"""Invariant of the copy on an object store: another home that takes the project over has the same files."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from chaos.invariants.context import Context, Finding
from rft_platform.common.files import digest_file, is_temporary

_COMPARED = ("rounds", "checkpoints")
_OF_THE_HOST = {"aside", "discarded", "intermediate", ".saving"}  # folders that are not stored
_NOT_STORED = (".lock", ".sqlite")
_SHOWN = 3


def copy_equals_the_home(context: Context) -> Iterator[Finding]:
    """The store has every file of rounds and checkpoints, and nothing else."""
    from rft_platform.object_store.mirror import open_mirror

    url = context.project.config.store_url
    if not url:
        return
    with tempfile.TemporaryDirectory(prefix="rft-chaos-copy-") as folder:
        mirror = open_mirror(Path(folder), url)
        mirror.take_over()
        mirror.fetch([Path(folder) / name for name in _COMPARED])
        ours, theirs = _digests(context.home.root), _digests(Path(folder))
    context.facts["files_on_the_object_store"] = float(len(theirs))
    for what, found in (("lacks", ours.keys() - theirs.keys()), ("has besides", theirs.keys() - ours.keys())):
        if found:
            yield Finding(f"{url} {what} {len(found)} files, {', '.join(sorted(found)[:_SHOWN])} among them")
    if different := sorted(path for path in ours.keys() & theirs.keys() if ours[path] != theirs[path]):
        yield Finding(f"{url} has {len(different)} files that differ, {', '.join(different[:_SHOWN])} among them")


def _digests(root: Path) -> dict[str, str]:
    """The digest of every file that is stored, by its path."""
    files = [path for name in _COMPARED for path in (root / name).rglob("*") if path.is_file()]
    return {
        path.relative_to(root).as_posix(): digest_file(path)
        for path in files
        if not (path.name.endswith(_NOT_STORED) or is_temporary(path.name) or _OF_THE_HOST & set(path.parts))
    }
