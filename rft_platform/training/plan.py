"""A request made concrete: its rows, its optimiser steps, and its identity. No weights are needed for it."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rft_platform.algorithms.objective import Objective
from rft_platform.errors import UserError
from rft_platform.files import digest_json
from rft_platform.training.batches import group_steps, stream_steps
from rft_platform.training.checkpoint import Position, read_position
from rft_platform.training.demonstrations import read_demonstrations
from rft_platform.training.manifest import identify
from rft_platform.training.protocol import AlgorithmSpec, TrainRequest
from rft_platform.training.rows import TrainingRows, digest_files, read_rollouts

#: Fields that say where things lie or who asks, not what is computed.
_NOT_IDENTITY = (
    "parent", "output", "rollouts", "judged", "demonstrations", "preferences", "data_position", "reference", "teacher",
    "save_interval", "save_hf_checkpoint", "lineage",
)  # fmt: skip


@dataclass(slots=True)
class TrainingPlan:
    """What a request comes to."""

    rows: TrainingRows
    steps: list[np.ndarray]  # indices of the rows of each optimiser step; steps without a gradient are left out
    position: Position | None  # in the demonstrations, after the last step
    objective: Objective
    identity: str  # equal for requests that lead from the same state by the same data and settings


class Planner:
    """Makes plans; keeps the last demonstrations, which consecutive requests share."""

    def __init__(self) -> None:
        self._demonstrations: tuple[str, TrainingRows] | None = None

    def plan(self, request: TrainRequest, parent: Path, parent_digest: str, objective: Objective) -> TrainingPlan:
        """The plan of ``request``; UserError or StorageError where its data cannot be used."""
        _check(request, objective)
        position = None
        if request.demonstrations is not None:
            rows = self._read_demonstrations(request.demonstrations, parent)
            start = _start(request, parent, rows.digest)
            count = _demonstration_count(request, int(rows.group.max()) + 1)
            steps = list(stream_steps(rows.group, request.train_batch_size, request.seed, start, count))
            position = Position(rows.digest, request.seed, start + count)
        else:
            rows = read_rollouts(
                request.rollouts, request.judged, policy_gradient=objective.policy_loss.policy_gradient
            )
            signal = _signal(rows, objective, request.algorithm)
            every = group_steps(rows.group, request.train_batch_size, request.seed, request.epochs)
            steps = [step for step in every if signal[step].any()][: request.max_steps]
        return TrainingPlan(rows, steps, position, objective, _identity(request, parent_digest, rows.digest, position))

    def _read_demonstrations(self, file: str, model_folder: Path) -> TrainingRows:
        template = [path.name for pattern in ("tokenizer*", "*.jinja") for path in sorted(model_folder.glob(pattern))]
        key = digest_files([file, *(str(model_folder / name) for name in template)])
        if self._demonstrations is None or self._demonstrations[0] != key:
            self._demonstrations = (key, read_demonstrations(file, model_folder))
        return self._demonstrations[1]


def _check(request: TrainRequest, objective: Objective) -> None:
    if (request.demonstrations is None) == (not request.rollouts):
        raise UserError("a training takes either rollouts with their judgements or demonstrations")
    if objective.needs_reference and request.reference is None:
        raise UserError(
            f"the loss {request.algorithm.policy_loss!r} with beta {request.algorithm.beta} needs a reference model: "
            "name its folder"
        )


def _start(request: TrainRequest, parent: Path, data_digest: str) -> int:
    """Where in the stream to begin: as told, else where the parent stopped if it used the same stream."""
    if request.data_position is not None:
        return request.data_position
    reached = read_position(parent)
    same = reached is not None and (reached.data_digest, reached.seed) == (data_digest, request.seed)
    return reached.rows if reached is not None and same else 0


def _demonstration_count(request: TrainRequest, conversations: int) -> int:
    if request.max_steps is not None:
        return request.max_steps * request.train_batch_size
    return request.epochs * conversations


def _signal(rows: TrainingRows, objective: Objective, algorithm: AlgorithmSpec) -> np.ndarray:
    """bool [R]: whether the row can have a gradient."""
    inert = objective.zero_advantage_is_inert and algorithm.token_advantage is None
    return np.array([s.loss_mask.any() and not (inert and not np.any(s.advantage)) for s in rows.samples], bool)


def _identity(request: TrainRequest, parent_digest: str, data_digest: str, position: Position | None) -> str:
    settings = {name: value for name, value in asdict(request).items() if name not in _NOT_IDENTITY}
    models = [None if folder is None else identify(Path(folder)) for folder in (request.reference, request.teacher)]
    end = None if position is None else asdict(position)
    return digest_json([settings, parent_digest, data_digest, models, end])
