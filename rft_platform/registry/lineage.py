"""Lineage both ways: from weights back to the rows, judge and code that made them, and from a row to its weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.errors import UserError
from rft_platform.files import digest_file
from rft_platform.registry.manifests import Manifest, all_manifests, chain, descendants

if TYPE_CHECKING:
    from rft_platform.experience.store import ExperienceStore
    from rft_platform.registry.models import ModelRegistry

_NAMED = ("round", "data_digest", "judge_version", "config_digest", "code_version", "dagster_run_id")


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
    data_unchanged: bool | None  # the files still have that digest; None where they were judged anew or are gone
    judge_version: str | None
    config_digest: str | None
    code_version: str | None
    dagster_run_id: str | None
    rollouts: tuple[RowFile, ...] = ()
    judged: RowFile | None = None
    rows_trained: int = 0  # judged rows that no filter dropped
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
    """Where a row came from and what became of it."""

    row_id: str
    round: int
    run_id: str
    group_id: str
    step: int
    task_id: str
    taskset: str
    policy_version: int  # that sampled it
    engine: str
    judgements: tuple[RowJudgement, ...]
    trained: tuple[CheckpointRef, ...]  # the checkpoints whose training read it
    descendants: tuple[CheckpointRef, ...]  # every later checkpoint that carries its trace

    def to_json(self) -> dict[str, Any]:
        """The trace as plain JSON values."""
        return asdict(self)


def trace_checkpoint(
    checkpoint: str | Path, store: "ExperienceStore", registry: "ModelRegistry | None" = None
) -> CheckpointTrace:
    """From a checkpoint folder, or ``models:/NAME@alias`` or ``models:/NAME/3``, back to the base model.

    With a registry, checkpoints carry their model versions and aliases. Raises ``UserError`` for what is no checkpoint.
    """
    manifests = chain(_folder(checkpoint, registry))
    known = _versions(registry)
    oldest = manifests[-1]
    return CheckpointTrace(
        trainings=tuple(
            _training(manifest, store if manifest.project == manifests[0].project else None, known)
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
    row, judgements = _find_row(row_id, store)
    known, manifests = _versions(registry), all_manifests(checkpoints)
    used = {judgement.judge_version for judgement in judgements if judgement.dropped_by is None}
    trained = [
        manifest
        for manifest in manifests
        if manifest.lineage.get("round") == row["round"] and manifest.lineage.get("judge_version") in used
    ]
    return RowTrace(
        **row,
        judgements=judgements,
        trained=tuple(_ref(manifest, known) for manifest in trained),
        descendants=tuple(_ref(manifest, known) for manifest in descendants(trained, manifests)),
    )


_Versions = Mapping[Path, tuple[int, tuple[str, ...]]]


def _folder(checkpoint: str | Path, registry: "ModelRegistry | None") -> Path:
    if not str(checkpoint).startswith("models:/"):
        return Path(checkpoint).absolute()
    if registry is None:
        raise UserError(f"{checkpoint}: a model address needs the registry; give the checkpoint's folder instead")
    return registry.resolve(str(checkpoint)).folder


def _versions(registry: "ModelRegistry | None") -> _Versions:
    """Newest model version and aliases of each checkpoint folder."""
    return {} if registry is None else {found.folder: (found.version, found.aliases) for found in registry.versions()}


def _ref(manifest: Manifest, known: _Versions) -> CheckpointRef:
    version, aliases = known.get(manifest.folder, (None, ()))
    return CheckpointRef(str(manifest.folder), manifest.policy_version, manifest.lineage.get("round"), version, aliases)


def _training(manifest: Manifest, store: "ExperienceStore | None", known: _Versions) -> TrainingTrace:
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
        **_rows_read(lineage, store),
    )


def _rows_read(lineage: Mapping[str, Any], store: "ExperienceStore | None") -> dict[str, Any]:
    """The fields of a ``TrainingTrace`` that tell of the round's files, as they lie there now."""
    number, judge = lineage.get("round"), lineage.get("judge_version")
    if store is None or number is None or judge is None:  # without a judge: trained on demonstrations
        return {"data_unchanged": None}
    rollouts = tuple(map(_row_file, store.rollout_files(number)))
    judged = store.judged_file(number, judge)
    if judged is None:
        return {"data_unchanged": None, "rollouts": rollouts}
    in_force = store.judge_version(number) == judge
    return {
        "data_unchanged": store.digest(number) == lineage.get("data_digest") if in_force else None,
        "rollouts": rollouts,
        "judged": _row_file(judged),
        "rows_trained": store.read_judged(number, judge, ["dropped_by"])["dropped_by"].null_count,
    }


def _row_file(path: Path) -> RowFile:
    from pyarrow.parquet import read_metadata

    return RowFile(str(path), digest_file(path), read_metadata(path).num_rows)


def _find_row(row_id: str, store: "ExperienceStore") -> tuple[dict[str, Any], tuple[RowJudgement, ...]]:
    from rft_platform.experience.queries import connect

    columns = ("row_id", "round", "run_id", "group_id", "step", "task_id", "taskset", "policy_version", "engine")
    with connect(store) as connection:
        found = connection.execute(f"SELECT {', '.join(columns)} FROM rollouts WHERE row_id = ?", [row_id]).fetchone()
        if found is None:
            raise UserError(f"row {row_id!r} is in no round of {store.root}; row ids have 32 hexadecimal digits")
        judged = connection.execute(
            "SELECT judge_version, reward, advantage, dropped_by FROM judgements WHERE row_id = ? ORDER BY ALL",
            [row_id],
        ).fetchall()
    row = dict(zip(columns, found, strict=True))
    in_force = store.judge_version(row["round"])
    return row, tuple(
        RowJudgement(version, reward, advantage, dropped_by, in_force=version == in_force)
        for version, reward, advantage, dropped_by in judged
    )
