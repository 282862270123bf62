"""Result types of ``lineage``: the trace of a checkpoint and the trace of a row."""

from dataclasses import asdict, dataclass, field
from typing import Any


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
    rows_trained: int = 0  # rows of the judgement, selection or dataset that no filter and no trainer left out
    rows_dropped: int = 0  # judged rows that a filter dropped, together with their reward
    rows_masked: int = 0  # judged rows that a filter dropped, but whose reward counts in its group
    rows_left_out: dict[str, int] = field(default_factory=dict)  # rows that the trainer left out, by reason
    dataset: RowFile | None = None  # dataset of an offline training
    selection: RowFile | None = None  # lists the rows, if they are not exactly those of the training's round
    judge_name: str | None = None  # None: the training read several rounds, or the note was lost
    retired: str = ""  # text about rollouts that were removed on purpose
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
            "rows_trained": sum(t.rows_trained for t in every),
            "dagster_run_ids": [t.dagster_run_id for t in every if t.dagster_run_id],
        }


@dataclass(frozen=True, slots=True)
class RowJudgement:
    """The judgement of a row by one judge version."""

    judge_version: str
    reward: float | None  # None: the judgement of the run failed
    advantage: float
    dropped_by: str | None
    in_force: bool
    masked: bool = False  # dropped, but the reward counts in its group


@dataclass(frozen=True, slots=True)
class RowTrace:
    """Origin of a row, and the checkpoints trained on it. A retired row has only the fields of its judgements."""

    row_id: str
    round: int
    run_id: str
    group_id: str
    step: int
    task_id: str | None
    taskset: str | None
    policy: str | None  # name of the called policy; None: the first policy
    policy_version: int | None  # version of the policy that sampled the row
    engine: str | None
    judgements: tuple[RowJudgement, ...]
    trained: tuple[CheckpointRef, ...]  # the checkpoints whose training read the row
    descendants: tuple[CheckpointRef, ...]  # all later checkpoints that descend from those
    retired: str = ""  # text about its round's rollouts, if they were removed on purpose

    def to_json(self) -> dict[str, Any]:
        """Return the trace as plain JSON values."""
        return asdict(self)
