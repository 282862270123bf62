"""Signed documents of the shared place: the home that publishes, and a record of each round.

Whoever can write to the shared place but does not have the key ``RFT_EXCHANGE_KEY`` cannot make the serving host load
weights, read files or remove them: the signature (HMAC-SHA256) covers the project, the home, the round and the digests
of all files of the weights.
"""

import hashlib
import hmac
import json
import os
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import canonical_json
from rft_platform.common.recorded_paths import CHECKPOINT_PREFIX
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.inference.canary import Canary
from rft_platform.rounds.project.record import RoundEvaluation, Start

EXCHANGE_KEY = "RFT_EXCHANGE_KEY"
MOST_BYTES = 64 * 2**20  #: of a document; an evaluation of 100,000 tasks needs less
_LEAST_KEY = 32  # characters
_SIGNATURE = "signature"
_PURPOSE = b"rft_platform: versions of a training host\n"  # no signature of another purpose is valid here

Document = TypeVar("Document", bound="SignedDocument")


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


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
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
            f"its signature is not valid: it was changed, or {EXCHANGE_KEY} of the host that wrote it is another one"
        )
    try:
        return kind.model_validate_json(json.dumps(found))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise RefusedDocumentError(f"{place}: {first['msg']}") from None


def _signature(content: Any, key: bytes) -> str:
    return hmac.new(key, _PURPOSE + canonical_json(content), hashlib.sha256).hexdigest()
