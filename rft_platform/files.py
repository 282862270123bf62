"""Durable file writes and content digests: the only way the platform puts bytes on disk."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path``; on success fsync and rename it, on failure remove it.

    Works for a file the body writes as well as for a folder the body creates and fills. An existing target file is
    replaced; an existing target folder is replaced too, after the new one is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temp
        _fsync_tree(temp)
        if temp.is_dir() and path.exists():
            old = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
            path.rename(old)
            temp.rename(path)
            shutil.rmtree(old)
        else:
            temp.replace(path)
        _fsync(path.parent)
    finally:
        if temp.is_dir():
            shutil.rmtree(temp)
        elif temp.exists():
            temp.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with atomic_path(path) as temp:
        temp.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """Read one JSON document."""
    return json.loads(path.read_text(encoding="utf-8"))


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of a JSON-serialisable value in canonical form, in hex."""
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fsync_tree(path: Path) -> None:
    if path.is_dir():
        for child in path.rglob("*"):
            _fsync(child)
    _fsync(path)
