"""Lineage in both directions: from weights to their rows, judge and code, and from a row to its weights."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import DamagedError, RegistryLostError, UserError
from rft_platform.common.files import digest_file
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.model_registry.manifests import OTHER_SAMPLING, Manifest, all_manifests, chain, descendants
from rft_platform.model_registry.sqlite_reader import model_name, read_versions
from rft_platform.rounds.reporting.imported_from import traces_behind
from rft_platform.traces.origins import Origin

if TYPE_CHECKING:
    from rft_platform.experience.file_ledger import FileEntry
    from rft_platform.experience.store import ExperienceStore
    from rft_platform.model_registry.models import ModelRegistry, RegisteredModel


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint, with its model version and aliases in the registry."""

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
    """One training of the chain: its parent, its rows and its checkpoint."""

    result: CheckpointRef
    weights_digest: str
    parent: str
    parent_version: int
    data_digest: str | None
    data_unchanged: bool | None  # whether the data still has ``data_digest``; None: unknown, e.g. after a new judgement
    judge_version: str | None
    config_digest: str | None
    code_version: str | None
    dagster_run_id: str | None
    rollouts: tuple[RowFile, ...] = ()
    judged: RowFile | None = None
    rows_trained: int | None = None  # rows that no filter and no trainer left out; None: not recorded
    rows_dropped: int = 0  # judged rows that a filter dropped, together with their reward
    rows_masked: int = 0  # judged rows that a filter dropped, but whose reward counts in its group
    rows_left_out: dict[str, int] = field(default_factory=dict)  # rows that the trainer left out, by reason
    dataset: RowFile | None = None  # dataset of an offline training
    selection: RowFile | None = None  # lists the rows, if they are not exactly those of the training's round
    judge_name: str | None = None  # None: the training read several rounds, or the note was lost
    retired: str = ""  # text about rollouts that were removed on purpose
    imported: tuple[Origin, ...] = ()  # traces of other tools that its rows, demonstrations or tasks were imported from
    more: dict[str, Any] = field(default_factory=dict)  # other entries of the lineage


@dataclass(frozen=True, slots=True)
class CheckpointTrace:
    """All trainings behind one checkpoint, newest first, down to the base model."""

    trainings: tuple[TrainingTrace, ...]
    base_model: str
    complete: bool  # False if the manifest of an ancestor is gone, so that the chain ends early

    def to_json(self) -> dict[str, Any]:
        """Return the trace as plain JSON values, with totals over the chain."""
        every = self.trainings
        return {
            **asdict(self),
            "rounds": [t.result.round for t in every if t.result.round is not None],
            "rows_trained": total_rows(every),
            "dagster_run_ids": [t.dagster_run_id for t in every if t.dagster_run_id],
        }


def of_rounds(trainings: Sequence[TrainingTrace]) -> list[TrainingTrace]:
    """The trainings of rounds; the others are checkpoints of a warm start."""
    return [training for training in trainings if training.result.round]


def total_rows(trainings: Sequence[TrainingTrace]) -> int | None:
    """The rows that the trainings of rounds were trained on; None if one of them has no record of its rows."""
    counts = [training.rows_trained for training in of_rounds(trainings)]
    return None if None in counts else sum(filter(None, counts))


@dataclass(frozen=True, slots=True)
class RowJudgement:
    """The judgement of a row by one judge version."""

    judge_version: str
    reward: float | None  # None: the judgement of the run failed
    advantage: float
    dropped_by: str | None
    in_force: bool
    masked: bool = False  # dropped, but the reward counts in its group
    judge_error: str | None = None  # why the judge failed on the run


@dataclass(frozen=True, slots=True)
class RowTrace:
    """Origin of a row, and the checkpoints trained on it. A retired or lost row has only its judgements."""

    row_id: str
    round: int
    run_id: str
    group_id: str
    step: int
    task_id: str | None
    taskset: str | None
    policy: str | None  # name of the called policy; None: the first policy
    policy_version: int | None  # version of the policy that sampled the row, at the end of the answer
    token_versions: list[int] | None  # of each token, if several versions sampled the answer
    engine: str | None
    judgements: tuple[RowJudgement, ...]
    trained: tuple[CheckpointRef, ...]  # the checkpoints whose training read the row
    descendants: tuple[CheckpointRef, ...]  # all later checkpoints that descend from those
    retired: str = ""  # text about its rollouts, if they were retired or set aside as damaged


LOG = logging.getLogger(__name__)
_NAMED = ("round", "data_digest", "judge_version", "config_digest", "code_version", "dagster_run_id", "row_selection")


#: Fields of a rollout row in a trace.
_ROW = (
    "row_id", "round", "run_id", "group_id", "step", "task_id", "taskset", "policy", "policy_version",
    "token_versions", "engine",
)  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k")
_LOST = "its rollouts were damaged and set aside: only its judgements are left"
_Versions = Mapping[Path, tuple[int, tuple[str, ...]]]


def trace_checkpoint(
    checkpoint: str | Path,
    store: "ExperienceStore",
    registry: "ModelRegistry | None" = None,
    *,
    project: tuple[str, str] | None = None,
    verify: bool = False,
) -> CheckpointTrace:
    """Trace a checkpoint back to the base model.

    ``checkpoint`` is a folder, ``models:/NAME@alias`` or ``models:/NAME/3``. With a registry, the trace
    names the model versions and aliases of checkpoints. Digests of files are taken from the store's ledgers; with
    ``verify`` every byte is read and compared. ``project`` is the project and name of the store's home, by default
    those of ``checkpoint``; trainings of other homes are traced without their rows. Raises ``UserError`` if
    ``checkpoint`` is not a checkpoint, and with ``verify`` ``StorageError`` with the names of damaged files.
    """
    manifests = chain(_folder(checkpoint, registry))
    known, project = _versions(registry), project or manifests[0].project
    oldest = manifests[-1]
    return CheckpointTrace(
        trainings=tuple(
            _training(each, store if each.project == project and _has_rows(store, each) else None, known, verify)
            for each in manifests
        ),
        base_model=oldest.base_model,
        complete=oldest.starts_from_base,
    )


def trace_row(
    row_id: str, store: "ExperienceStore", checkpoints: Path, registry: "ModelRegistry | None" = None
) -> RowTrace:
    """Trace a row to the checkpoints below ``checkpoints`` that were trained on it, and to all their descendants.

    Raises ``UserError`` for a row that is not in the store.
    """
    row, judgements, retired = _find_row(row_id, store)
    other_sampling = _has_other_sampling({name: row.pop(name) for name in _SAMPLING})
    known, manifests = _versions(registry), all_manifests(checkpoints)
    trained = [
        manifest
        for manifest in manifests
        if not (other_sampling and OTHER_SAMPLING in manifest.left_out) and _trained_on(manifest.lineage, row, store)
    ]
    return RowTrace(
        **row,
        judgements=judgements,
        trained=tuple(_ref(manifest, known) for manifest in trained),
        descendants=tuple(_ref(manifest, known) for manifest in descendants(trained, manifests)),
        retired=retired,
    )


def trained_with(
    checkpoints: Path, condition: Callable[[Mapping[str, Any]], bool], registry: "ModelRegistry | None" = None
) -> list[CheckpointRef]:
    """The checkpoints below ``checkpoints`` whose lineage meets a condition."""
    known = _versions(registry)
    return [_ref(manifest, known) for manifest in all_manifests(checkpoints) if condition(manifest.lineage)]


def descendants_of(
    checkpoints: Path, trained: Collection[str], registry: "ModelRegistry | None" = None
) -> list[CheckpointRef]:
    """The checkpoints that descend from those in the folders ``trained``, and are not among them."""
    known, manifests = _versions(registry), all_manifests(checkpoints)
    found = descendants([manifest for manifest in manifests if str(manifest.folder) in trained], manifests)
    return [ref for ref in (_ref(manifest, known) for manifest in found) if ref.checkpoint not in trained]


def _trained_on(lineage: Mapping[str, Any], row: Mapping[str, Any], store: "ExperienceStore") -> bool:
    """Whether a training took a row."""
    from rft_platform.experience.selections import TRAINED_ON, read_selection

    number, settled = lineage.get("round"), lineage.get("row_selection")
    if settled is None or number is None or str(row["round"]) not in settled["judge_versions"]:
        return False
    taken = read_selection(store, number, ["row_id", "use"], lineage.get("policy", DEFAULT_POLICY)).to_pylist()
    return any(one["row_id"] == row["row_id"] and one["use"] in TRAINED_ON for one in taken)


def _has_other_sampling(sampling: Mapping[str, Any]) -> bool:
    """Whether a row's log-probs are not those of the policy's distribution; a policy gradient leaves such rows out."""
    temperature, top_p, top_k = (sampling[name] for name in _SAMPLING)
    return temperature is not None and (temperature <= 0 or top_p < 1 or top_k > 0)


def _folder(checkpoint: str | Path, registry: "ModelRegistry | None") -> Path:
    if not str(checkpoint).startswith("models:/"):
        return Path(checkpoint).absolute()
    if registry is None:
        raise UserError(f"{checkpoint}: a model address needs the registry; give the checkpoint's folder instead")
    for found in _registered(registry, model_name(str(checkpoint)) or registry.model_name):
        if checkpoint in found.addresses and found.folder.is_dir():
            return found.folder
    return registry.resolve(str(checkpoint)).folder  # raises an error that explains what is wrong with the address


def _registered(registry: "ModelRegistry", name: str) -> "list[RegisteredModel]":
    """Versions of a model, read directly from SQLite if possible, otherwise through MLflow."""
    found = read_versions(registry.tracking_uri, name)
    return found if found is not None else registry.versions() if name == registry.model_name else []


def _versions(registry: "ModelRegistry | None") -> _Versions:
    """Newest model version and aliases of each checkpoint folder."""
    if registry is None:
        return {}
    try:
        return {found.folder: (found.version, found.aliases) for found in _registered(registry, registry.model_name)}
    except RegistryLostError as error:  # the trace itself comes from manifests and ledgers
        LOG.warning("model versions are not shown: %s", error)
        return {}


def _ref(manifest: Manifest, known: _Versions) -> CheckpointRef:
    version, aliases = known.get(manifest.folder, (None, ()))
    return CheckpointRef(str(manifest.folder), manifest.policy_version, manifest.lineage.get("round"), version, aliases)


def _has_rows(store: "ExperienceStore", manifest: Manifest) -> bool:
    """Whether the store's home made the training: another home may have a project of the same name."""
    from rft_platform.rounds.project.record import read

    number, settled = manifest.lineage.get("round"), manifest.lineage.get("row_selection")
    if number is None or settled is None:
        return True  # demonstrations, or a dataset, whose digest is compared later
    known = read(store, number).trained(manifest.lineage.get("policy", DEFAULT_POLICY))
    return known is not None and known.lineage.get("data_digest") == manifest.lineage.get("data_digest")


def _training(manifest: Manifest, store: "ExperienceStore | None", known: _Versions, verify: bool) -> TrainingTrace:
    """Build the trace of one training. ``store`` is None for another home, which has its rounds."""
    lineage = manifest.lineage
    return TrainingTrace(
        result=_ref(manifest, known),
        weights_digest=manifest.weights_digest,
        parent=str(manifest.parent_folder),
        parent_version=manifest.parent_version,
        data_digest=lineage.get("data_digest"),
        judge_version=lineage.get("judge_version"),
        config_digest=lineage.get("config_digest"),
        code_version=lineage.get("code_version"),
        dagster_run_id=lineage.get("dagster_run_id"),
        imported=traces_behind(lineage, store),
        more={name: value for name, value in lineage.items() if name not in _NAMED},
        **_without(rows_read(lineage, store, verify), manifest.left_out),
    )


def _without(read: dict[str, Any], left_out: Mapping[str, int]) -> dict[str, Any]:
    """The fields of ``rows_read``, without the rows that the trainer left out."""
    if not (left_out and read.get("rows_trained")):
        return read
    return {**read, "rows_trained": read["rows_trained"] - sum(left_out.values()), "rows_left_out": dict(left_out)}


def _find_row(row_id: str, store: "ExperienceStore") -> tuple[dict[str, Any], tuple[RowJudgement, ...], str]:
    """Return a row, its judgements, and the text about its rollouts if they were retired or lost."""
    from rft_platform.experience.queries import find_row, judgements_of

    row, retired = find_row(store, row_id, (*_ROW, *_SAMPLING)), ""
    if row is not None:
        judged = judgements_of(store, row_id, [row["round"]])
    else:
        judged = judgements_of(store, row_id, store.rounds())
        if not judged:
            raise UserError(f"row {row_id!r} is in no round of {store.root}; row ids have 32 hexadecimal digits")
        row = {name: judged[0].get(name) for name in (*_ROW, *_SAMPLING)}
        retired = store.ledger(row["round"]).read().retirement(store.home) or _LOST
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
                masked=bool(judgement.get("masked")),
                judge_error=judgement["judge_error"],
            )
            for judgement in judged
        ),
        retired,
    )


def rows_read(lineage: Mapping[str, Any], store: "ExperienceStore | None", verify: bool) -> dict[str, Any]:
    """Return the fields of a ``TrainingTrace`` about the round's files, from the round's current ledger.

    ``store`` is None for a training of another home. With ``verify`` every byte is read and compared. Raises
    ``StorageError`` with the names of damaged files.
    """
    number = lineage.get("round")
    if store is not None and number is not None and lineage.get("dataset"):
        return _dataset_read(lineage, store, number, verify)
    if store is not None and number is not None and lineage.get("row_selection"):
        return _selection_read(lineage, store, number, verify)
    return _rows_recorded(lineage)


def _rows_recorded(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for a training on demonstrations or in another home, whose counts are only in its manifest."""
    from rft_platform.experience.selections import FILTERED, TRAINED_ON

    found: dict[str, Any] = {"data_unchanged": None}
    if settled := lineage.get("row_selection"):
        rows = settled.get("rows", {})
        trained = sum(rows.get(use, 0) for use in TRAINED_ON) if rows else None
        return {**found, "rows_trained": trained, "rows_dropped": rows.get(FILTERED, 0)}
    return {**found, "rows_trained": lineage.get("dataset_rows")}


def _selection_read(
    lineage: Mapping[str, Any], store: "ExperienceStore", training: int, verify: bool
) -> dict[str, Any]:
    """Return the fields for rows that were selected one by one: the selection file and the rollouts behind it."""
    from rft_platform.experience.parquet import fetch_unless_here
    from rft_platform.experience.selections import FILTERED, TRAINED_ON, selection_file
    from rft_platform.rounds.project.record import Judged, read

    settled, file = lineage["row_selection"], selection_file(store, training, lineage.get("policy", DEFAULT_POLICY))
    versions = {int(number): version for number, version in settled["judge_versions"].items()}
    rollouts, retired, judgements, masked = [], [], [], 0
    if verify:
        fetch_unless_here(file)
    same = store.stored_digest(file) == settled["sha256"]
    if verify and not same:
        raise DamagedError(f"{file}: missing, or changed since the training (sha256 {settled['sha256'][:16]})")
    for number, version in sorted(versions.items()):
        contents, folder = store.ledger(number).read(), store.round_folder(number)
        if verify:
            store.check(number, digest=True)
        rollouts += [_row_file(folder / name, contents.files[name]) for name in contents.rollouts()]
        retired += [contents.retirement(store.home)] if contents.retired else []
        judged = store.judged_file(number, version, contents=contents)
        if judged is not None:
            entry = contents.files[str(judged.relative_to(folder))]
            judgements.append(_row_file(judged, entry))
            masked += entry.masked or 0
        same = (
            same
            and judged is not None
            and store.digest(number, judge_version=version) == settled["digests"][str(number)]
        )
        same = same and judged is not None and not store.damaged_sizes(number, contents)
    rows, filtered = sum(settled["rows"][use] for use in TRAINED_ON), settled["rows"][FILTERED]
    names = {(read(store, n).judged or Judged()).judge_names.get(version) for n, version in versions.items()}
    return {
        "data_unchanged": same,
        "rollouts": tuple(rollouts),
        "retired": "; ".join(retired),
        "selection": RowFile(str(file), settled["sha256"], sum(settled["rows"].values())),
        "judged": judgements[0] if len(judgements) == 1 else None,
        "judge_name": names.pop() if len(names) == 1 else None,
        "rows_trained": rows,
        "rows_masked": min(masked, filtered),
        "rows_dropped": max(filtered - masked, 0),
    }


def _dataset_read(lineage: Mapping[str, Any], store: "ExperienceStore", number: int, verify: bool) -> dict[str, Any]:
    """Return the fields for the dataset of an offline training, from its round's record and file as they are now."""
    from rft_platform.rounds.project.record import read

    file, digest = store.round_folder(number) / str(lineage["dataset"]), str(lineage["dataset_sha256"])
    known = read(store, number).dataset
    if known is None or known.digest != lineage.get("data_digest"):  # another project of the same name elsewhere
        return _rows_recorded(lineage)
    same = file.exists() and file.stat().st_size == known.bytes
    if verify and not (same and digest_file(file) == (known.sha256 if known.erased else digest)):
        raise DamagedError(f"{file}: missing, or changed since the training (sha256 {digest[:16]})")
    rows = int(lineage["dataset_rows"])
    return {"data_unchanged": same, "dataset": RowFile(str(file), digest, rows), "rows_trained": rows}


def _row_file(path: Path, entry: "FileEntry") -> RowFile:
    return RowFile(str(path), entry.sha256, entry.rows)
