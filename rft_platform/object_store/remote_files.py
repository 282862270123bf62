"""Objects below one URL of fsspec: whole documents, files with size and digest, and the repetition of failed requests.

An upload is one object that nobody reads before a commit names it, so a repeated upload does no harm. Only ``create``
is conditional: of several writers one creates the object (S3, Google Cloud Storage, Azure, a folder, memory).
"""

import hashlib
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from rft_platform.common.errors import TransientError, UserError
from rft_platform.common.files import atomic_path

LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_ATTEMPTS = 9
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_REQUEST_S = 120.0  # longest time of one request, which moves at most ``_PART`` bytes
_MOST_BYTES = 2**30  # of a document
_PART = 16 * 2**20
_PARALLEL = 16  # files that move at the same time
_GAP = 256 * 2**10  # bytes of an object that are read and dropped rather than requested around
_DAMAGED = "its content does not have the digest that the commit names"
#: Answers of a store that a repetition does not change.
_FINAL = (FileExistsError, IsADirectoryError, NotADirectoryError)
#: Time-outs of the connections to S3; boto's own are one minute each.
_S3_OPTIONS: dict[str, Any] = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60}}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Where the content of a file is, and how it is recognised."""

    object: str  # name below the URL
    size: int
    sha256: str
    offset: int = 0  # where the content starts in the object

    def to_json(self) -> dict[str, Any]:
        """The arguments of the class."""
        found = {"object": self.object, "size": self.size, "sha256": self.sha256}
        return {**found, "offset": self.offset} if self.offset else found


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that the store lists."""

    name: str
    size: int
    written_at: float  # seconds since the epoch, by the store's clock; infinite if the store does not say it


class RemoteFiles:
    """The objects below a URL; names are relative to it. Raises TransientError for a request that always fails."""

    def __init__(self, url: str) -> None:
        """Raises UserError if fsspec does not know the URL's protocol, or its package is not installed."""
        from fsspec.core import split_protocol, url_to_fs

        self.url = url.rstrip("/")
        options = _S3_OPTIONS if split_protocol(url)[0] in ("s3", "s3a") else {}
        try:
            self._files, path = url_to_fs(self.url, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"store_url {url}: {error}; for S3 install rft-platform[s3], for Google Cloud Storage rft-platform[gcs]"
            ) from error
        self._path = path.rstrip("/")
        self._limit = {"timeout": _REQUEST_S} if self._files.async_impl else {}

    def read(self, name: str) -> bytes | None:
        """A whole document; None if there is none."""
        place, options = self._at(name), {"start": 0, "end": _MOST_BYTES, **self._limit}  # a range: one request on S3
        try:
            content: bytes = self._repeated("read", name, lambda: self._files.cat_file(place, **options))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, in place of the one with this name."""
        self._in_folder(name)
        self._repeated("write", name, lambda: self._files.pipe_file(self._at(name), content, **self._limit))

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object unless there is one with this name; False if there is one.

        After a lost answer the object of this very call may be the one that exists: the caller compares the contents.
        """
        self._in_folder(name)
        place = self._at(name)
        try:
            self._repeated("create", name, lambda: self._files.pipe_file(place, content, mode="create", **self._limit))
        except FileExistsError:
            return False
        return True

    def upload(self, files: dict[str, Path]) -> None:
        """Copy local files to the objects named; several at a time."""
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(lambda item: self._upload_one(*item), files.items()))

    def _upload_one(self, name: str, source: Path) -> None:
        self._in_folder(name)
        place, size = self._at(name), source.stat().st_size
        if size <= _PART:
            content = source.read_bytes()
            self._repeated("write", name, lambda: self._files.pipe_file(place, content, **self._limit))
            return

        def put() -> None:
            self._files.put_file(str(source), place)
            if (found := self._files.size(place)) != size:
                raise OSError(f"{found} bytes arrived, {size} were sent")

        try:
            self._repeated("write", name, put)
        except UserError:
            source.open("rb").close()  # raises the error of a file that is gone or cannot be read
            raise

    def download(self, files: Mapping[Path, StoredFile]) -> None:
        """Copy stored files to local ones, which appear when they are complete and have the recorded size and digest.

        Files that lie close together in one object take one request.
        """
        each = len(files) <= _PARALLEL  # many files are flushed to the disk together
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(lambda group: self._download_group(group, sync=each), _groups(files)))
        if not each:
            os.sync()

    def _download_group(self, group: list[tuple[Path, StoredFile]], *, sync: bool) -> None:
        (target, first), (_, last) = group[0], group[-1]
        if len(group) == 1 and first.size > _PART:
            self._download_large(target, first, sync=sync)
            return

        def get() -> list[bytes]:
            content = self._part(first.object, first.offset, last.offset + last.size)
            starts = [file.offset - first.offset for _, file in group]
            parts = [content[start : start + file.size] for start, (_, file) in zip(starts, group, strict=True)]
            for part, (_, file) in zip(parts, group, strict=True):
                if hashlib.sha256(part).hexdigest() != file.sha256:
                    raise OSError(_DAMAGED)
            return parts

        for part, (target, _) in zip(self._repeated("read", first.object, get), group, strict=True):
            with atomic_path(target, sync=sync, sweep=sync) as temporary:
                temporary.write_bytes(part)

    def _download_large(self, target: Path, file: StoredFile, *, sync: bool) -> None:
        with atomic_path(target, sync=sync) as temporary, temporary.open("wb") as stream:
            for _ in range(_ATTEMPTS):
                stream.seek(0)
                if self._copy(file, stream) == file.sha256:
                    break
            else:
                raise TransientError(f"{self.address(file.object)}: {_DAMAGED}: start again; restore it if that fails")

    def _copy(self, file: StoredFile, stream: IO[bytes]) -> str:
        """Write the content of ``file`` to ``stream``; returns its digest."""
        found, end = hashlib.sha256(), file.offset + file.size
        for start in range(file.offset, end, _PART):
            part = self._read_part(file.object, start, min(start + _PART, end))
            found.update(part)
            stream.write(part)
        return found.hexdigest()

    def content(self, file: StoredFile) -> bytes:
        """The content of a small stored file."""
        return self._read_part(file.object, file.offset, file.offset + file.size)

    def _read_part(self, name: str, start: int, end: int) -> bytes:
        return self._repeated("read", name, lambda: self._part(name, start, end))

    def _part(self, name: str, start: int, end: int) -> bytes:
        """Bytes of an object, by one request."""
        content: bytes = b""
        if end > start:
            content = self._files.cat_file(self._at(name), start=start, end=end, **self._limit)
        if len(content) != end - start:
            raise OSError(f"{len(content)} of {end - start} bytes were received")
        return content

    def objects(self, folder: str) -> list[StoredObject]:
        """All objects below ``folder``. Only maintenance lists a store: a request returns a thousand names."""
        try:
            found = self._repeated("read", folder, lambda: self._files.find(self._at(folder), detail=True))
        except FileNotFoundError:
            return []
        root = len(self._path) + 1
        return [StoredObject(path[root:], entry["size"] or 0, _written_at(entry)) for path, entry in found.items()]

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        with suppress(FileNotFoundError):
            self._repeated("remove", name, lambda: self._files.rm_file(self._at(name)))

    @property
    def filesystem(self) -> Any:
        """The fsspec file system, for DuckDB."""
        return self._files

    def address(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}"

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _in_folder(self, name: str) -> None:
        """Create the folder of ``name`` where the store has folders."""
        if not self._files.async_impl:
            self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _repeated(self, what: str, name: str, request: Callable[[], _T]) -> _T:
        """The result of ``request``; a failed one is repeated, with growing random waits."""
        for attempt in range(_ATTEMPTS):
            try:
                return request()
            except PermissionError as error:
                raise UserError(
                    f"{self.address(name)}: the store refuses access ({error}): check the keys in the environment"
                ) from error
            except FileNotFoundError as error:
                if what == "read" or what == "remove":
                    raise
                raise UserError(f"{self.url}: {error}: create the bucket, or correct store_url") from error
            except _FINAL:
                raise
            except Exception as error:
                if attempt == _ATTEMPTS - 1:
                    raise TransientError(
                        f"{self.address(name)}: {_ATTEMPTS} attempts to {what} it have failed "
                        f"({type(error).__name__}: {error}): check that the store can be reached"
                    ) from error
                LOG.info("%s: %s failed (%r), attempt %d", self.address(name), what, error, attempt + 1)
            wait = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt)
            time.sleep(wait * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")


def _groups(files: Mapping[Path, StoredFile]) -> Iterator[list[tuple[Path, StoredFile]]]:
    """The files that one request reads: neighbours in an object, with at most ``_GAP`` unwanted bytes between two."""
    group: list[tuple[Path, StoredFile]] = []
    for item in sorted(files.items(), key=lambda item: (item[1].object, item[1].offset)):
        if group:
            (_, first), (_, last), file = group[0], group[-1], item[1]
            near = file.object == last.object and file.offset - last.offset - last.size <= _GAP
            if not near or file.offset + file.size - first.offset > _PART:
                yield group
                group = []
        group.append(item)
    if group:
        yield group


def _written_at(entry: Mapping[str, Any]) -> float:
    """When an object was written, from its entry in a listing; each kind of store has another name for it."""
    for name in ("LastModified", "last_modified", "updated", "mtime", "created"):
        match entry.get(name):
            case datetime() as moment:
                return moment.timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case str() as text:
                return datetime.fromisoformat(text).timestamp()
    return math.inf
