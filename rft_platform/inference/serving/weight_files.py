"""Check whether a folder of weights fits the served model, before the engine changes anything.

Reads only file headers and, if the folder holds a tied output head and the tensor that it is tied to, their bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.common.digests import MANIFEST, digest_once, digest_weights, weight_files
from rft_platform.common.errors import DamagedError, WeightMismatchError, some
from rft_platform.common.files import digest_file, digest_json, read_json, read_sealed_json
from rft_platform.common.recorded_paths import from_manifest

HEADER_LENGTH_BYTES = 8  # a safetensors file begins with the size of its header, little-endian
CHUNK_BYTES = 1 << 24
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Position of a tensor: ``length`` bytes from ``start`` of ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of the served model. ``ties``: copy -> original; files need not contain the copy."""

    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]

    def check(self, given: Mapping[str, tuple[int, ...]], source: Path) -> None:
        """Raise WeightMismatchError unless names and shapes of ``given`` are those of the served model."""
        expected = {name for name in self.shapes if name not in self.ties or name in given}
        check_names(set(given), expected, source)
        for name, shape in given.items():
            if shape != self.shapes[name]:
                raise WeightMismatchError(
                    f"{source}: {name} has shape {shape}; in the served model it has shape {self.shapes[name]}"
                )


def is_adapter(folder: Path) -> bool:
    """Whether ``folder`` holds a LoRA adapter instead of full weights."""
    return (folder / "adapter_config.json").exists()


def base_of(adapter: Path, known: Sequence[Path]) -> Path:
    """The folder of the full weights that ``adapter`` was trained on: one of ``known``, or one that the adapter names.

    The manifest of a checkpoint has the digest of these weights; WeightMismatchError if no folder has it. An adapter
    from elsewhere belongs to the folder that it names, if that exists here, and otherwise to the first of ``known``.
    """
    expected, named = _lineage(adapter)
    if expected is None:
        return next((folder for folder in named if weight_files(folder)), known[0])
    for folder in dict.fromkeys([*known, *named]):
        if weight_files(folder) and digest_weights(folder, digest_once) == expected:
            return folder
    raise WeightMismatchError(
        f"{adapter}: this adapter was trained on the full weights with digest {expected[:12]}, but none of "
        f"{', '.join(map(str, dict.fromkeys([*known, *named])))} holds them: load these full weights first, or start "
        "the engine with their folder"
    )


def _lineage(adapter: Path) -> tuple[str | None, list[Path]]:
    """Digest and folders of the full weights of ``adapter``, as far as its files name them."""
    try:
        named = [Path(read_json(adapter / "adapter_config.json").get("base_model_name_or_path") or "")]
        expected = None
        if (adapter / MANIFEST).exists():
            manifest = read_sealed_json(adapter / MANIFEST)
            expected = manifest.get("base_digest")
            if manifest.get("base_model"):
                named.insert(0, from_manifest(manifest["base_model"], manifest["request"].get("output"), adapter))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DamagedError) as error:
        raise WeightMismatchError(
            f"{adapter}: adapter_config.json or {MANIFEST} cannot be read ({error}); restore the folder"
        ) from error
    return expected, [folder for folder in named if folder.is_absolute()]  # else it is a name on the hub


def read_headers(folder: Path) -> dict[str, TensorPlace]:
    """All tensors of the folder's weight files; WeightMismatchError if there is no file or one is incomplete."""
    files = weight_files(folder)
    if not files:
        raise WeightMismatchError(f"{folder}: contains no .safetensors file")
    places: dict[str, TensorPlace] = {}
    for file in files:
        places.update(_read_header(file))
    return places


def layout_of(folder: Path) -> Layout:
    """The layout of the model in ``folder``; its output head may be tied to the embedding."""
    shapes = {name: place.shape for name, place in read_headers(folder).items()}
    embedding = next((name for name in shapes if name.endswith(EMBEDDING)), None)
    if embedding is None or not (HEAD not in shapes or _says_tied(read_json(folder / "config.json"))):
        return Layout(shapes, {})
    return Layout({**shapes, HEAD: shapes[embedding]}, {HEAD: embedding})


def check_folder(layout: Layout, folder: Path) -> None:
    """Raise WeightMismatchError unless ``folder`` holds complete weights of exactly this layout."""
    places = read_headers(folder)
    layout.check({name: place.shape for name, place in places.items()}, folder)
    for name, owner in layout.ties.items():
        if name in places and not _equal(places[name], places[owner]):
            raise tie_broken(folder, name, owner)


def tie_broken(source: Path, name: str, owner: str) -> WeightMismatchError:
    """The error for a tensor that should be a copy of another but differs."""
    return WeightMismatchError(f"{source}: {name} differs from {owner}, but the served model ties the two")


def check_names(given: set[str], expected: set[str], source: Path) -> None:
    """Raise WeightMismatchError if tensors are missing or unexpected; the error names some of these tensors."""
    missing, unexpected = sorted(expected - given), sorted(given - expected)
    if missing or unexpected:
        raise WeightMismatchError(
            f"{source}: its tensors are not those of the served model: "
            + "; ".join(
                f"{len(n)} {kind} ({some(n)})" for kind, n in (("missing", missing), ("unexpected", unexpected)) if n
            )
        )


def _read_header(file: Path) -> dict[str, TensorPlace]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little")
            size = file.stat().st_size
            if length > size:
                raise ValueError(f"its header has {length} bytes, but the file has only {size}")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        begin = HEADER_LENGTH_BYTES + length
        places = {
            name: TensorPlace(
                file, info["dtype"], tuple(info["shape"]), begin + (at := info["data_offsets"])[0], at[1] - at[0]
            )
            for name, info in header.items()
        }
        end = max((place.start + place.length for place in places.values()), default=begin)
        if end != size:
            raise ValueError(f"according to its header the file has {end} bytes, but it has {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightMismatchError(f"{file}: not a complete safetensors file: {error}") from error
    return places


def _says_tied(config: dict[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings")))


def _equal(one: TensorPlace, other: TensorPlace) -> bool:
    if (one.dtype, one.length) != (other.dtype, other.length):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for done in range(0, one.length, CHUNK_BYTES):
            count = min(CHUNK_BYTES, one.length - done)
            if left.read(count) != right.read(count):
                return False
    return True


def model_digest(folder: Path) -> str:
    """Digest of a model's configuration, tokenizer and templates; without the weights, because they change."""
    files = sorted([*folder.glob("*.json"), *folder.glob("*.jinja")])
    return digest_json({file.name: digest_file(file) for file in files if not file.name.endswith(".index.json")})
