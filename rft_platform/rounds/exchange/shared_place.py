"""The place that two hosts of an online project share: ``<checkpoint_root_dir>/<project>/<name>``.

``checkpoint_root_dir`` is a folder on a shared file system, or a URL of an object store that fsspec supports. Documents
are written whole: atomically in a folder, by one request in an object store.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rft_platform.common.digests import Digest, digest_once, first_damage
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, create_text, write_text
from rft_platform.experience.file_names import is_round_key
from rft_platform.rounds.exchange.records import (
    MOST_BYTES,
    Document,
    RefusedDocumentError,
    ServedFile,
    SignedDocument,
    exchange_key,
    signed,
    verified,
)
from rft_platform.rounds.project.project import Project

_PUBLISHED = "published"
_SUFFIX = ".json"


class SharedPlace:
    """Documents and folders below one path or URL."""

    def __init__(self, root: str, inside: str, key: bytes) -> None:
        """``key`` signs the documents. Raises UserError if fsspec has no package for the URL's protocol."""
        from fsspec.core import url_to_fs

        self.name = inside  #: <project>/<name>
        self._key = key
        self.url = f"{root.rstrip('/')}/{inside}"
        self.folder = None if "://" in root else Path(root) / inside  #: None: an object store
        try:
            self._files, path = url_to_fs(root, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(f"checkpoint_root_dir {root}: {error}") from error
        self._path = f"{path.rstrip('/')}/{inside}"

    def marks(self) -> dict[str, str]:
        """The names of the published records, each with a mark that changes when the record changes."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._path}/{_PUBLISHED}", detail=True)
        except FileNotFoundError:
            return {}
        named = {each["name"].rpartition("/")[2]: each for each in found}
        rounds = sorted(name for name in named if name.endswith(_SUFFIX) and is_round_key(name.removesuffix(_SUFFIX)))
        return {name.removesuffix(_SUFFIX): _mark(named[name]) for name in rounds}

    def read(self, name: str, kind: type[Document]) -> Document | None:
        """A published document; None if there is none.

        Raises StorageError if it cannot be read, and RefusedDocumentError if its signature or content is not valid.
        """
        place = f"{self._path}/{_PUBLISHED}/{name}{_SUFFIX}"
        try:
            content = self._files.cat_file(place, start=0, end=MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{name}{_SUFFIX} cannot be read: {error}") from error
        try:
            if len(content) > MOST_BYTES:
                raise RefusedDocumentError(f"it has more than {MOST_BYTES:,} bytes")
            return verified(content, kind, self._key)
        except RefusedDocumentError as error:
            raise RefusedDocumentError(f"{name}{_SUFFIX}: {error}") from None

    def write(self, name: str, document: SignedDocument) -> None:
        """Publish a document, in place of the one with this name. Raises StorageError if it is too large."""
        content = signed(document, self._key)
        if len(content) > MOST_BYTES:
            raise StorageError(f"{name}{_SUFFIX} has {len(content):,} bytes, of at most {MOST_BYTES:,}")
        if self.folder is not None:
            write_text(self.folder / _PUBLISHED / f"{name}{_SUFFIX}", content.decode())
        else:
            self._files.makedirs(f"{self._path}/{_PUBLISHED}", exist_ok=True)
            self._files.pipe_file(f"{self._path}/{_PUBLISHED}/{name}{_SUFFIX}", content)

    def create(self, name: str, document: SignedDocument) -> None:
        """Publish a document unless there is one with this name.

        Of several hosts one creates it: in a folder (O_EXCL, also by NFS), and on S3, Google Cloud Storage, Azure and
        in memory by fsspec's mode ``create``. For other stores fsspec looks first and writes then, and two hosts may
        both write: the caller must read the document afterwards, and again before it relies on it.
        """
        content, file = signed(document, self._key), f"{name}{_SUFFIX}"
        with suppress(FileExistsError):
            if self.folder is None:
                self._files.makedirs(f"{self._path}/{_PUBLISHED}", exist_ok=True)
                self._files.pipe_file(f"{self._path}/{_PUBLISHED}/{file}", content, mode="create")
            else:
                create_text(self.folder / _PUBLISHED / file, content.decode())

    def upload(self, source: Path, name: str, files: Sequence[str]) -> None:
        """Copy ``files`` of a folder to ``name`` below this place."""
        for inside in files:
            target = f"{self._path}/{name}/{inside}"
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(source / inside), target)

    def download(self, name: str, files: Mapping[str, ServedFile], target: Path) -> None:
        """Copy ``files`` of the folder ``name`` to ``target``, which appears when it is complete.

        Raises RefusedDocumentError if a file does not have the size and digest that ``files`` names.
        """
        with atomic_path(target) as temporary:
            temporary.mkdir()
            for inside, described in files.items():
                source, local = f"{self._path}/{name}/{inside}", temporary / inside
                if self._files.size(source) != described.size:  # before a large file fills the disk
                    raise RefusedDocumentError(f"{name}/{inside} does not have the size that the record names")
                local.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(source, str(local))
            if (damage := damage_of(temporary, files)) is not None:
                raise RefusedDocumentError(f"{name}: {damage}")

    def remove(self, name: str) -> None:
        """Remove the folder ``name``, if it exists."""
        if self._files.exists(f"{self._path}/{name}"):
            self._files.rm(f"{self._path}/{name}", recursive=True)


def damage_of(folder: Path, files: Mapping[str, ServedFile], digest: Digest | None = digest_once) -> str | None:
    """Describe the first file of ``folder`` that is not the one that a record describes; without ``digest`` by size."""
    return first_damage(folder, {name: file.model_dump() for name, file in files.items()}, digest)


def _mark(details: Mapping[str, Any]) -> str:
    """What a store says about an object: size, time, and the like; a store names them in its own way."""
    return json.dumps(details, sort_keys=True, default=str)


def shared_place(project: Project) -> SharedPlace | None:
    """The place where a project passes versions to another host; None if this home both serves and trains.

    Raises UserError if the key that signs the versions is not set.
    """
    config = project.config
    key = exchange_key(config)
    if key is None:
        return None
    return SharedPlace(str(config.checkpoint_root_dir), f"{config.project}/{config.name}", key)
