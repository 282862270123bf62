"""The place that two hosts of an online project share: ``<checkpoint_root_dir>/<project>/<name>``.

``checkpoint_root_dir`` is a folder on a shared file system, or a URL of an object store that fsspec supports. Documents
are written whole: atomically in a folder, by one request in an object store.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, write_json
from rft_platform.rounds.project.project import Project

_PUBLISHED = "published"


class SharedPlace:
    """Documents and folders below one path or URL."""

    def __init__(self, root: str, inside: str) -> None:
        """Raises UserError if fsspec has no package for the URL's protocol."""
        from fsspec.core import url_to_fs

        self.url = f"{root.rstrip('/')}/{inside}"
        self.folder = None if "://" in root else Path(root) / inside  #: None: an object store
        try:
            self._files, path = url_to_fs(root, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UserError(f"checkpoint_root_dir {root}: {error}") from error
        self._path = f"{path.rstrip('/')}/{inside}"

    def marks(self) -> dict[str, str]:
        """The names of the published documents, each with a mark that changes when the document changes."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._path}/{_PUBLISHED}", detail=True)
        except FileNotFoundError:
            return {}
        named = {each["name"].rpartition("/")[2]: each for each in found}
        return {name: _mark(named[name]) for name in sorted(named) if name.endswith(".json") and name[0] != "."}

    def read(self, name: str) -> dict[str, Any] | None:
        """A published document; None if there is none. Raises StorageError if it cannot be read."""
        try:
            document = json.loads(self._files.cat_file(f"{self._path}/{_PUBLISHED}/{name}"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.url}/{_PUBLISHED}/{name} cannot be read: {error}") from error
        return dict(document)

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Publish a document, in place of the one with this name."""
        if self.folder is not None:
            write_json(self.folder / _PUBLISHED / name, document)
        else:
            content = json.dumps(document).encode()
            self._files.makedirs(f"{self._path}/{_PUBLISHED}", exist_ok=True)
            self._files.pipe_file(f"{self._path}/{_PUBLISHED}/{name}", content)

    def upload(self, source: Path, name: str, without: str) -> None:
        """Copy the files of a folder to ``name`` below this place, without the sub-folder ``without``."""
        for file in sorted(source.rglob("*")):
            inside = file.relative_to(source)
            if file.is_file() and inside.parts[0] != without:
                target = f"{self._path}/{name}/{inside.as_posix()}"
                self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(file), target)

    def download(self, name: str, target: Path) -> None:
        """Copy the folder ``name`` to ``target``, which appears when it is complete."""
        with atomic_path(target) as temporary:
            for path in self._files.find(f"{self._path}/{name}"):
                local = temporary / path.rpartition(f"/{name}/")[2]
                local.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(local))
            if not temporary.is_dir():
                raise StorageError(f"{self.url}/{name} holds no files")

    def remove(self, name: str) -> None:
        """Remove the folder ``name``, if it exists."""
        if self._files.exists(f"{self._path}/{name}"):
            self._files.rm(f"{self._path}/{name}", recursive=True)


def _mark(details: Mapping[str, Any]) -> str:
    """What a store says about an object: size, time, and the like; a store names them in its own way."""
    return json.dumps(details, sort_keys=True, default=str)


def shared_place(project: Project) -> SharedPlace | None:
    """The place where a project passes versions to another host; None if this home both serves and trains."""
    config = project.config
    if not (config.online and config.mode in ("serve", "train") and config.checkpoint_root_dir):
        return None
    return SharedPlace(config.checkpoint_root_dir, f"{config.project}/{config.name}")
