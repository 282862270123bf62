"""Lineage both ways: from weights back to the rows, judge and code that made them, and from a row to its weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.errors import DamagedError, UserError
from rft_platform.experience.selections import TRAINED_ON, read_selection, selection_file
from rft_platform.files import digest_file, read_json
from rft_platform.registry.manifests import Manifest, all_manifests, chain, descendants
from rft_platform.registry.reading import model_name, read_versions

if TYPE_CHECKING:
    from rft_platform.experience.ledger import FileEntry
    from rft_platform.experience.store import ExperienceStore
    from rft_platform.registry.models import ModelRegistry, RegisteredModel

DATASET_NOTE = "dataset.json"  # what a round's folder says of the dataset that was written into it
_NAMED = ("round", "data_digest", "judge_version", "config_digest", "code_version", "dagster_run_id", "row_selection")


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint, and what the registry calls it."""

    checkpoint: str
    policy_version: int
    round: int | None
    model_version: int | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFile:
    """A Parquet file that a training read."""

    path: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class TrainingTrace:
    """One training of the chain: from its parent, on these rows, to its checkpoint."""

    result: CheckpointRef
    weights_digest: str
    parent: str
    parent_version: int
    data_digest: str | None
    data_unchanged: bool | None  # the round still has that digest; None where it was judged anew
    judge_version: str | None
    config_digest: str | None
    code_version: str | None
    dagster_run_id: str | None
    rollouts: tuple[RowFile, ...] = ()
    judged: RowFile | None = None
    rows_trained: int = 0  # judged rows that no filter dropped; rows of the dataset
    dataset: RowFile | None = None  # of an offline training
    selection: RowFile | None = None  # names its rows one by one, where they are of several rounds or not all
    retired: str = ""  # in words what became of rollouts that were removed on purpose
    more: dict[str, Any] = field(default_factory=dict)  # whatever else the lineage holds


@dataclass(frozen=True, slots=True)
class CheckpointTrace:
    """Everything behind one checkpoint, newest training first, down to the base model."""

    trainings: tuple[TrainingTrace, ...]
    base_model: str
    complete: bool  # False where the manifest of an ancestor is gone, so that the chain ends early

    def to_json(self) -> dict[str, Any]:
        """The trace as plain JSON values, with totals over the chain."""
        every = self.trainings
        return {
            **asdict(self),
            "rounds": [t.result.round for t in every if t.result.round is not None],
            "rows_trained": sum(t.rows_trained for t in every),
            "dagster_run_ids": [t.dagster_run_id for t in every if t.dagster_run_id],
        }


@dataclass(frozen=True, slots=True)
class RowJudgement:
    """What one judge version made of a row."""

    judge_version: str
    reward: float
    advantage: float
    dropped_by: str | None
    in_force: bool


@dataclass(frozen=True, slots=True)
class RowTrace:
    """Where a row came from and what became of it. Of a retired row only what its judgements say is known."""

    row_id: str
    round: int
    run_id: str
    group_id: str
    step: int
    task_id: str | None
    taskset: str | None
    policy_version: int | None  # that sampled it
    engine: str | None
    judgements: tuple[RowJudgement, ...]
    trained: tuple[CheckpointRef, ...]  # the checkpoints whose training read it
    descendants: tuple[CheckpointRef, ...]  # every later checkpoint that carries its trace
    retired: str = ""  # in words what became of its round's rollouts, if they were removed on purpose

    def to_json(self) -> dict[str, Any]:
        """The trace as plain JSON values."""
        return asdict(self)


def trace_checkpoint(
    checkpoint: str | Path, store: "ExperienceStore", registry: "ModelRegistry | None" = None, *, verify: bool = False
) -> CheckpointTrace:
    """From a checkpoint folder, or ``models:/NAME@alias`` or ``models:/NAME/3``, back to the base model.

    With a registry, checkpoints carry their model versions and aliases. What the files hold is taken from the store's
    ledgers; with ``verify`` every byte of them is read and compared. Raises ``UserError`` for what is no checkpoint,
    and with ``verify`` ``StorageError`` naming damaged files.
    """
    manifests = chain(_folder(checkpoint, registry))
    known = _versions(registry)
    oldest = manifests[-1]
    return CheckpointTrace(
        trainings=tuple(
            _training(manifest, store if manifest.project == manifests[0].project else None, known, verify)
            for manifest in manifests
        ),
        base_model=str(oldest.lineage.get("base_model") or oldest.parent),
        complete=oldest.starts_from_base,
    )


def trace_row(
    row_id: str, store: "ExperienceStore", checkpoints: Path, registry: "ModelRegistry | None" = None
) -> RowTrace:
    """From a row to the checkpoints below ``checkpoints`` that were trained on it, and to all that descend from them.

    Raises ``UserError`` for a row that the store does not hold.
    """
    row, judgements, retired = _find_row(row_id, store)
    known, manifests = _versions(registry), all_manifests(checkpoints)
    used = {judgement.judge_version for judgement in judgements if judgement.dropped_by is None}
    trained = [manifest for manifest in manifests if _trained_on(manifest.lineage, row, used, store)]
    return RowTrace(
        **row,
        judgements=judgements,
        trained=tuple(_ref(manifest, known) for manifest in trained),
        descendants=tuple(_ref(manifest, known) for manifest in descendants(trained, manifests)),
        retired=retired,
    )


def _trained_on(lineage: Mapping[str, Any], row: Mapping[str, Any], used: set[str], store: "ExperienceStore") -> bool:
    """Whether a training read a row; ``used``: the judge versions by which no filter dropped it."""
    number, settled = lineage.get("round"), lineage.get("row_selection")
    if settled is None or number is None:
        return number == row["round"] and lineage.get("judge_version") in used
    if str(row["round"]) not in settled["judge_versions"]:
        return False
    taken = read_selection(store, number, ["row_id", "use"]).to_pylist()
    return any(one["row_id"] == row["row_id"] and one["use"] in TRAINED_ON for one in taken)


#: What a trace says of a rollout row.
_ROW = ("row_id", "round", "run_id", "group_id", "step", "task_id", "taskset", "policy_version", "engine")
_Versions = Mapping[Path, tuple[int, tuple[str, ...]]]


def _folder(checkpoint: str | Path, registry: "ModelRegistry | None") -> Path:
    if not str(checkpoint).startswith("models:/"):
        return Path(checkpoint).absolute()
    if registry is None:
        raise UserError(f"{checkpoint}: a model address needs the registry; give the checkpoint's folder instead")
    for found in _registered(registry, model_name(str(checkpoint)) or registry.model_name):
        names = (f"/{found.version}", *(f"@{alias}" for alias in found.aliases))
        if checkpoint in [f"models:/{found.name}{name}" for name in names] and found.folder.is_dir():
            return found.folder
    return registry.resolve(str(checkpoint)).folder  # says what is wrong with the address


def _registered(registry: "ModelRegistry", name: str) -> "list[RegisteredModel]":
    """The versions of a model: read directly where that is possible, else asked of MLflow."""
    found = read_versions(registry.tracking_uri, name)
    return found if found is not None else registry.versions() if name == registry.model_name else []


def _versions(registry: "ModelRegistry | None") -> _Versions:
    """Newest model version and aliases of each checkpoint folder."""
    if registry is None:
        return {}
    return {found.folder: (found.version, found.aliases) for found in _registered(registry, registry.model_name)}


def _ref(manifest: Manifest, known: _Versions) -> CheckpointRef:
    version, aliases = known.get(manifest.folder, (None, ()))
    return CheckpointRef(str(manifest.folder), manifest.policy_version, manifest.lineage.get("round"), version, aliases)


def _training(manifest: Manifest, store: "ExperienceStore | None", known: _Versions, verify: bool) -> TrainingTrace:
    """``store`` is None for a training of another project, whose rounds lie elsewhere."""
    lineage = manifest.lineage
    return TrainingTrace(
        result=_ref(manifest, known),
        weights_digest=manifest.weights_digest,
        parent=manifest.parent,
        parent_version=manifest.parent_version,
        data_digest=lineage.get("data_digest"),
        judge_version=lineage.get("judge_version"),
        config_digest=lineage.get("config_digest"),
        code_version=lineage.get("code_version"),
        dagster_run_id=lineage.get("dagster_run_id"),
        more={name: value for name, value in lineage.items() if name not in _NAMED},
        **_rows_read(lineage, store, verify),
    )


def _rows_read(lineage: Mapping[str, Any], store: "ExperienceStore | None", verify: bool) -> dict[str, Any]:
    """The fields of a ``TrainingTrace`` that tell of the round's files, as the round's ledger has them now."""
    number, judge = lineage.get("round"), lineage.get("judge_version")
    if store is not None and number is not None and lineage.get("dataset"):
        return _dataset_read(lineage, store.round_folder(number), verify)
    if store is not None and number is not None and lineage.get("row_selection"):
        return _selection_read(lineage["row_selection"], store, number, verify)
    if store is None or number is None or judge is None:  # without a judge: trained on demonstrations
        return {"data_unchanged": None}
    contents, folder = store.ledger(number).read(), store.round_folder(number)
    if verify:
        store.check(number, digest=True)
    found: dict[str, Any] = {
        "data_unchanged": None,
        "rollouts": tuple(_row_file(folder / name, contents.files[name]) for name in contents.rollouts()),
        "retired": contents.retirement(),
    }
    judged = store.judged_file(number, judge, contents=contents)
    if judged is None:
        return found
    entry = contents.files[str(judged.relative_to(folder))]
    if store.judge_version(number) == judge:
        same = store.digest(number) == lineage.get("data_digest")
        found["data_unchanged"] = same and not store.damaged_sizes(number, contents)
    return {**found, "judged": _row_file(judged, entry), "rows_trained": entry.kept or 0}


def _selection_read(
    settled: Mapping[str, Any], store: "ExperienceStore", training: int, verify: bool
) -> dict[str, Any]:
    """The fields that tell of rows that were chosen one by one: that file, and the rollouts it chose from."""
    file, versions = selection_file(store, training), {int(n): v for n, v in settled["judge_versions"].items()}
    rollouts, retired, same = [], [], file.is_file() and digest_file(file) == settled["sha256"]
    if verify and not same:
        raise DamagedError(f"{file}: missing, or not what was trained on (sha256 {settled['sha256'][:16]})")
    for number, version in sorted(versions.items()):
        contents, folder = store.ledger(number).read(), store.round_folder(number)
        if verify:
            store.check(number, digest=True)
        rollouts += [_row_file(folder / name, contents.files[name]) for name in contents.rollouts()]
        retired += [contents.retirement()] if contents.retired else []
        there = store.judged_file(number, version, contents=contents) is not None
        same = same and there and store.digest(number, judge_version=version) == settled["digests"][str(number)]
        same = same and not store.damaged_sizes(number, contents)
    rows = sum(settled["rows"][use] for use in TRAINED_ON)
    return {
        "data_unchanged": same,
        "rollouts": tuple(rollouts),
        "retired": "; ".join(retired),
        "selection": RowFile(str(file), settled["sha256"], sum(settled["rows"].values())),
        "rows_trained": rows,
    }


def _dataset_read(lineage: Mapping[str, Any], folder: Path, verify: bool) -> dict[str, Any]:
    """The fields that tell of an offline training's dataset, as its round's note and its file have it now."""
    file, digest, note = folder / str(lineage["dataset"]), str(lineage["dataset_sha256"]), folder / DATASET_NOTE
    known = read_json(note) if note.exists() else {}
    if known.get("digest") != lineage.get("data_digest"):  # another project of this name, in a folder of its own
        return {"data_unchanged": None}
    same = file.exists() and file.stat().st_size == known["bytes"]
    if verify and not (same and digest_file(file) == digest):
        raise DamagedError(f"{file}: missing, or not what was trained on (sha256 {digest[:16]})")
    rows = int(lineage["dataset_rows"])
    return {"data_unchanged": same, "dataset": RowFile(str(file), digest, rows), "rows_trained": rows}


def _row_file(path: Path, entry: "FileEntry") -> RowFile:
    return RowFile(str(path), entry.sha256, entry.rows)


def _find_row(row_id: str, store: "ExperienceStore") -> tuple[dict[str, Any], tuple[RowJudgement, ...], str]:
    """A row, its judgements, and what became of its rollouts if they were retired."""
    from rft_platform.experience.queries import find_row, judgements_of

    row, retired = find_row(store, row_id, _ROW), ""
    if row is not None:
        judged = judgements_of(store, row_id, [row["round"]])
    else:
        gone = {n: contents.retirement() for n in store.rounds() if (contents := store.ledger(n).read()).retired}
        judged = judgements_of(store, row_id, gone)
        if not judged:
            raise UserError(f"row {row_id!r} is in no round of {store.root}; row ids have 32 hexadecimal digits")
        row = {name: judged[0].get(name) for name in _ROW}
        retired = gone[row["round"]]
    in_force = store.judge_version(row["round"])
    return (
        row,
        tuple(
            RowJudgement(
                judgement["judge_version"],
                judgement["reward"],
                judgement["advantage"],
                judgement["dropped_by"],
                in_force=judgement["judge_version"] == in_force,
            )
            for judgement in judged
        ),
        retired,
    )
