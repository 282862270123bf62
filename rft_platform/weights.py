"""Digest that identifies a set of weights in the trainer, the engine and the registry."""

from collections.abc import Callable
from pathlib import Path

from rft_platform.errors import UserError
from rft_platform.files import digest_file, digest_json


def digest_weights(folder: Path, digest: Callable[[Path], str] = digest_file) -> str:
    """SHA-256 of a model folder's safetensors: of the file if there is one, else of all names and digests."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model folder {folder}: holds no .safetensors file; convert the weights to safetensors first")
    if len(files) == 1:
        return digest(files[0])
    return digest_json({file.name: digest(file) for file in files})
