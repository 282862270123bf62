"""Packs: objects that hold the contents of many small files, one after the other.

A round has about ten notes, ledgers and manifests of a few kB. A request takes much longer than their transfer, so
those of one commit are one object, and the small packs of many commits are merged into larger ones.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from rft_platform.object_store.remote_files import StoredFile

FOLDER = "files/packs"
SMALL = 64 * 2**10  # longest file in a pack
_FULL = 8 * 2**20  # a pack has about this size at most


def packed(contents: Mapping[str, tuple[bytes, str]]) -> Iterator[tuple[str, bytes, dict[str, StoredFile]]]:
    """Put contents, given with their SHA-256 by path, into packs: name, content and files of each one."""
    names, size = list[str](), 0
    for path, (content, _) in contents.items():
        if names and size + len(content) > _FULL:
            yield _pack({name: contents[name] for name in names})
            names, size = [], 0
        names.append(path)
        size += len(content)
    if names:
        yield _pack({name: contents[name] for name in names})


def _pack(contents: Mapping[str, tuple[bytes, str]]) -> tuple[str, bytes, dict[str, StoredFile]]:
    whole = b"".join(content for content, _ in contents.values())
    name, offset, files = f"{FOLDER}/{secrets.token_hex(8)}-{len(whole)}", 0, dict[str, StoredFile]()
    for path, (content, digest) in contents.items():
        files[path] = StoredFile(name, len(content), digest, offset)
        offset += len(content)
    return name, whole, files


def to_merge(files: Iterable[StoredFile], *, erase: bool) -> set[str]:
    """The packs among the objects of ``files`` that are worth merging: those less than half full.

    ``erase``: those that also hold contents which no file has any more.
    """
    used = Counter[str]()
    for file in files:
        if file.object.startswith(f"{FOLDER}/"):
            used[file.object] += file.size
    if erase:
        return {name for name, size in used.items() if size < int(name.rpartition("-")[2])}
    small = {name for name, size in used.items() if size < _FULL / 2}
    return small if len(small) > 1 else set()
