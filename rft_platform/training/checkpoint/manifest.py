"""The manifest of a checkpoint: its origin, and a digest of every file. Does not import torch."""

import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rft_platform.common.digests import (
    MANIFEST,
    digest_once,
    digest_weights,
    first_damage,
    saved_state_damage,
)
from rft_platform.common.errors import DamagedError, StorageError, UserError
from rft_platform.common.files import digest_file, digest_json, read_sealed_json, write_sealed_json

STEPS = "steps.json"  # metrics of each optimiser step
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.jinja", "*.tiktoken",
)  # fmt: skip
_READERS = 8  # files that are read at the same time
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json`` of a checkpoint folder."""

    policy_version: int  # global optimiser step of the weights
    parent: str  # folder from which training started
    parent_version: int
    parent_digest: str  # ``state_digest`` of the parent
    request_digest: str  # identity of the training: parent, data and settings
    weights_digest: str
    request: dict[str, Any]
    lineage: dict[str, Any]
    result: dict[str, Any]  # metrics, seconds and processor time of the training
    created_at: float  # seconds since the epoch
    versions: dict[str, str]  # library -> version
    dtype: str  # dtype of the published weights
    files: dict[str, dict[str, Any]]  # relative path -> {"size": bytes, "sha256": hex}
    base_model: str | None = None  # folder of the full weights if this checkpoint holds an adapter
    lora: dict[str, Any] | None = None  # settings of the adapter
    base_digest: str | None = None  # ``weights_digest`` of the full weights of an adapter
    deferred_state: bool = False  # True: ``files`` lacks the trainer state, which is saved later or not at all
    schema_version: int = SCHEMA_VERSION

    @property
    def state_digest(self) -> str:
        """Identity of the state that training continues from: weights, optimizer, position, but not the metrics.

        The training's request and the resulting weights determine optimizer and position, so the identity is known
        before the state is on disk.
        """
        return digest_json([self.request_digest, self.weights_digest, self.base_digest])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``, the last file of a checkpoint."""
    write_sealed_json(folder / MANIFEST, asdict(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of ``folder``; None for a model that is not a checkpoint of the platform."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = Manifest(**read_sealed_json(path))
    except (ValueError, TypeError) as error:
        raise StorageError(f"{path}: not a manifest of schema version {SCHEMA_VERSION} ({error})") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise StorageError(
            f"{path}: has schema version {manifest.schema_version}, this version of rft-platform reads {SCHEMA_VERSION}"
        )
    return manifest


def describe_files(folder: Path, known: Mapping[Path, str] | None = None) -> dict[str, dict[str, Any]]:
    """Size and digest of every file below ``folder``. Files whose digest is not ``known`` are read, in parallel."""
    known = known or {}
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with ThreadPoolExecutor(min(_READERS, len(paths) or 1)) as pool:
        digests = pool.map(lambda path: known.get(path) or digest_file(path), paths)
        return {
            path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
            for path, digest in zip(paths, digests, strict=True)
        }


def companions(folder: Path) -> list[Path]:
    """The files of a model folder that define tokenisation and end tokens. Every checkpoint copies its parent's."""
    return sorted({path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()})


def verify(folder: Path, manifest: Manifest) -> None:
    """Raise DamagedError with the first file of a checkpoint that is missing or differs from the manifest."""
    why = first_damage(folder, manifest.files) or saved_state_damage(folder)
    if why is not None:
        raise DamagedError(f"checkpoint {folder} is damaged: {why}; restore it or train from an earlier checkpoint")


def verified_weights(folder: Path) -> str:
    """Return the digest of a model's weights. A platform checkpoint is verified first; raises DamagedError.

    Models that are not checkpoints of the platform have no recorded digests to compare with.
    """
    manifest = _manifest_of_model(folder)
    if manifest is None:
        return digest_weights(folder, digest_once)
    verify(folder, manifest)
    return manifest.weights_digest


def identify(folder: Path) -> str:
    """Identity of the state in ``folder``: a checkpoint's ``state_digest``, else the digest of a model's files.

    A model's files are those that change tokens or weights: safetensors, ``config.json``, generation settings,
    tokenizer and chat template. A file is hashed once per process for a given path, modification time and size.
    """
    manifest = _manifest_of_model(folder)
    if manifest is not None:
        return manifest.state_digest
    config = [path for path in [folder / "config.json"] if path.is_file()]
    others = {path.name: digest_once(path) for path in [*config, *companions(folder)]}
    return digest_json([digest_weights(folder, digest_once), others])


def _manifest_of_model(folder: Path) -> Manifest | None:
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    return read_manifest(folder)


@cache
def library_versions() -> dict[str, str]:
    """Library versions that a checkpoint records."""
    names = ("rft-platform", "torch", "transformers", "safetensors", "peft")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}
