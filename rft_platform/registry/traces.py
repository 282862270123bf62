"""What a trace of a checkpoint or of a row says."""

from dataclasses import asdict, dataclass, field
from typing import Any


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
    reward: float | None  # None: the judge failed on the run
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
    policy: str | None  # which of the policies beside the first was called; None: the first
    policy_version: int | None  # that sampled it
    engine: str | None
    judgements: tuple[RowJudgement, ...]
    trained: tuple[CheckpointRef, ...]  # the checkpoints whose training read it
    descendants: tuple[CheckpointRef, ...]  # every later checkpoint that carries its trace
    retired: str = ""  # in words what became of its round's rollouts, if they were removed on purpose

    def to_json(self) -> dict[str, Any]:
        """The trace as plain JSON values."""
        return asdict(self)
