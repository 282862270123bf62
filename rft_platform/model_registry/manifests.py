"""Read checkpoint manifests from disk, and find the ancestors and descendants of a checkpoint."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_platform.common.digests import MANIFEST
from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.files import read_sealed_json
from rft_platform.common.recorded_paths import CHECKPOINT_PREFIX, from_manifest

#: Entries of a lineage that may be folders.
_FOLDERS = ("base_model", "teacher")
OTHER_SAMPLING = "sampled with temperature 0, top_p or top_k"
#: Metrics of a training that count rows which no filter dropped and which it did not train on.
_LEFT_OUT = {"rows_other_sampling": OTHER_SAMPLING, "rows_too_long": "longer than max_model_len"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Origin of a checkpoint. Only ``manifest.json`` is read: the weights may be gone."""

    folder: Path
    policy_version: int
    parent: str  # folder of the checkpoint or model from which it was trained, as passed to the trainer
    output: str | None  # folder in which the checkpoint was written, as passed to the trainer
    parent_version: int
    weights_digest: str
    lineage: Mapping[str, Any]  # round, data_digest, judge_version, config_digest, ...; folders are current ones
    left_out: Mapping[str, int] = field(default_factory=dict)  # rows that the trainer did not train on, by reason

    @property
    def parent_folder(self) -> Path:
        """The parent's current folder; in a copied or moved project, the parent's folder in that project."""
        return from_manifest(self.parent, self.output, self.folder)

    @property
    def base_model(self) -> str:
        """The base model's current folder or configured name; the parent's folder if the lineage names none."""
        return str(self.lineage.get("base_model") or self.parent_folder)

    @property
    def project(self) -> tuple[Any, Any]:
        """Project and name of the run that trained it; round numbers are unique within these."""
        return self.lineage.get("project"), self.lineage.get("name")

    @property
    def starts_from_base(self) -> bool:
        """Whether the parent is a base model, and not a checkpoint (which may have lost its manifest)."""
        return self.parent_version == 0 and not Path(self.parent).name.startswith(CHECKPOINT_PREFIX)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of checkpoint ``folder``. Raises ``UserError`` if there is none, ``StorageError`` if broken."""
    path = folder / MANIFEST
    if not path.exists():
        raise UserError(
            f"{folder} is not a checkpoint of this platform: it has no {MANIFEST}; give a global_step_<n> folder"
        )
    try:
        found = read_sealed_json(path)
        output, lineage = found.get("request", {}).get("output"), found["lineage"]
        metrics = found.get("result", {}).get("metrics", {})
        moved = {name: str(from_manifest(lineage[name], output, folder)) for name in _FOLDERS if lineage.get(name)}
        return Manifest(
            folder=folder,
            policy_version=found["policy_version"],
            parent=found["parent"],
            output=output,
            parent_version=found["parent_version"],
            weights_digest=found["weights_digest"],
            lineage={**lineage, **moved},
            left_out={reason: int(metrics[name]) for name, reason in _LEFT_OUT.items() if metrics.get(name)},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({error!r})") from error


def chain(folder: Path) -> list[Manifest]:
    """Return the manifests of ``folder`` and its ancestors, newest first, as far back as manifests exist."""
    found, folders = [read_manifest(folder)], {folder}
    while ((parent := found[-1].parent_folder) / MANIFEST).exists():
        if parent in folders:
            raise StorageError(f"{parent}: its manifest names a descendant as its parent")
        found.append(read_manifest(parent))
        folders.add(parent)
    return found


def all_manifests(root: Path) -> list[Manifest]:
    """Return every checkpoint below ``root``, oldest policy version first."""
    found = [read_manifest(folder) for folder in _checkpoint_folders(root) if (folder / MANIFEST).exists()]
    return sorted(found, key=lambda manifest: (manifest.policy_version, str(manifest.folder)))


def _checkpoint_folders(root: Path) -> Iterator[Path]:
    """Yield the checkpoint folders below ``root``, without searching inside them."""
    for folder, below, _ in os.walk(root):
        yield from (Path(folder) / name for name in below if name.startswith(CHECKPOINT_PREFIX))
        below[:] = [name for name in below if not name.startswith(CHECKPOINT_PREFIX)]


def descendants(of: Sequence[Manifest], among: Sequence[Manifest]) -> list[Manifest]:
    """Return the checkpoints in ``among`` that descend, over any number of trainings, from a checkpoint in ``of``."""
    children: dict[Path, list[Manifest]] = {}
    for manifest in among:
        children.setdefault(manifest.parent_folder, []).append(manifest)
    found: dict[Path, Manifest] = {}
    waiting = [manifest.folder for manifest in of]
    while waiting:
        new = [child for child in children.get(waiting.pop(), []) if child.folder not in found]
        found |= {child.folder: child for child in new}
        waiting += [child.folder for child in new]
    return sorted(found.values(), key=lambda manifest: manifest.policy_version)
