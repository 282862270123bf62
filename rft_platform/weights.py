"""Identity of a set of weights: what the trainer publishes, the engine serves and the registry tags."""

from collections.abc import Callable
from pathlib import Path

from rft_platform.errors import UserError
from rft_platform.files import digest_file, digest_json


def digest_weights(folder: Path, digest: Callable[[Path], str] = digest_file) -> str:
    """SHA-256 of a model folder's safetensors: of the file where there is one, of all names and digests otherwise."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model folder {folder}: holds no .safetensors file; convert the weights to safetensors first")
    if len(files) == 1:
        return digest(files[0])
    return digest_json({file.name: digest(file) for file in files})
