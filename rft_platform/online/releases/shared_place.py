"""The place that two hosts of an online project share: ``<checkpoint_root_dir>/<project>/<name>``.

``checkpoint_root_dir`` is a folder on a shared file system, or a URL of an object store that fsspec supports. Documents
are written whole: atomically in a folder, by one request in an object store.
"""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rft_platform.common.digests import Digest, digest_once, first_damage
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import atomic_path, canonical_json, create_text, write_text
from rft_platform.common.recorded_paths import CHECKPOINT_PREFIX
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.experience.file_names import is_round_key
from rft_platform.inference.canary import Canary
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import RoundEvaluation, Start

EXCHANGE_KEY = "RFT_EXCHANGE_KEY"
MOST_BYTES = 64 * 2**20  #: of a document; an evaluation of 100,000 tasks needs less
_LEAST_KEY = 32  # characters
_SIGNATURE = "signature"
_PURPOSE = b"rft_platform: versions of a training host\n"  # no signature of another purpose is valid here

Document = TypeVar("Document", bound="SignedDocument")
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_PUBLISHED = "published"
_SUFFIX = ".json"


class RefusedDocumentError(StorageError):
    """A document of the shared place is not signed with the key of this host, or its content is not valid."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SignedDocument(_Strict):
    """What every document names: an old or foreign document is not valid under the name of another one."""

    home: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # id of the home that publishes
    project: str  # <project>/<name>


class Owner(SignedDocument):
    """The home that publishes its versions at the shared place."""


def _is_inside(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name != "/".join(parts) or ".." in parts or parts[0] == "/" or re.search(r"[\\\0]", name):
        raise ValueError("expected the relative path of a file inside the checkpoint")
    return name


_FileName = Annotated[str, AfterValidator(_is_inside)]


class ServedFile(_Strict):
    """Size and SHA-256 of a file."""

    size: int = Field(ge=0)
    sha256: _Digest


class Weights(_Strict):
    """Where the weights are below the shared place, and all files that the serving host reads."""

    folder: str | None = Field(pattern=rf"^(warm_start/)?{CHECKPOINT_PREFIX}[0-9]+$")  # None: those of the base model
    kept: bool  # False: the training host has removed them
    files: dict[_FileName, ServedFile]


class Record(SignedDocument):
    """A version that a round published, and the parts of the round's record that the serving host needs."""

    round: int = Field(ge=0)
    revision: int = Field(ge=0)  # grows with each change of the round's record; an older one is not taken again
    policy_version: int = Field(ge=0)
    weights_digest: _Digest
    weights: Weights
    canary: Canary | None
    mean_reward: float | None
    start: Start | None
    evaluation: RoundEvaluation


def exchange_key(config: RftConfig) -> bytes | None:
    """The key that signs versions; None for a project that passes none to another host.

    Raises UserError if such a project has no key.
    """
    if not passes_versions(config):
        return None
    key = os.environ.get(EXCHANGE_KEY, "")
    if len(key) < _LEAST_KEY:
        state = "is not set" if not key else f"has {len(key)} characters"
        raise UserError(
            f"{EXCHANGE_KEY} {state}: the hosts that serve and train this project sign the versions at "
            f"{config.checkpoint_root_dir} with it; set it to the same random text of at least {_LEAST_KEY} characters "
            "on both (`openssl rand -hex 32`), or leave out checkpoint_root_dir if both commands use one RFT_HOME"
        )
    return key.encode()


def passes_versions(config: RftConfig) -> bool:
    """Whether this host only serves or only trains, and passes versions by ``checkpoint_root_dir``."""
    return bool(config.online and config.mode in ("serve", "train") and config.checkpoint_root_dir)


def signed(document: SignedDocument, key: bytes) -> bytes:
    """The document as JSON with its signature."""
    content = document.model_dump(mode="json")
    return json.dumps({**content, _SIGNATURE: _signature(content, key)}).encode()


def verified(content: bytes, kind: type[Document], key: bytes) -> Document:
    """The document that ``signed`` wrote. Raises RefusedDocumentError if its signature or its content is not valid."""
    try:
        found = json.loads(content)
        signature = found.pop(_SIGNATURE, None) if isinstance(found, dict) else None
        expected = _signature(found, key)
    except (ValueError, RecursionError) as error:
        raise RefusedDocumentError(f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(signature, str) or not signature.isascii():
        raise RefusedDocumentError("it is not signed")
    if not hmac.compare_digest(signature, expected):
        raise RefusedDocumentError(
            f"its signature is not valid: it was changed, or the host that wrote it has another {EXCHANGE_KEY}"
        )
    try:
        return kind.model_validate_json(json.dumps(found))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise RefusedDocumentError(f"{place}: {first['msg']}") from None


def _signature(content: Any, key: bytes) -> str:
    return hmac.new(key, _PURPOSE + canonical_json(content), hashlib.sha256).hexdigest()


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
    """What a store says about an object: for instance size and time; a store names them in its own way."""
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
