"""Turn a request into a plan: its rows, its optimiser steps, and its identity. No weights are needed.

The steps depend only on data and seed, not on the number of ranks. The identity is equal for requests with the same
start state, data and settings.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from rft_platform.algorithms.objective import Objective
from rft_platform.algorithms.plugins import plugins_digest
from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_json
from rft_platform.training.checkpoint.manifest import companions, identify
from rft_platform.training.checkpoint.reading import Position, read_position
from rft_platform.training.data.offline_data import among_rollouts, read_demonstrations, read_preferences
from rft_platform.training.data.rollout_rows import TrainingRows, digest_files, read_rollouts
from rft_platform.training.protocol import TrainRequest

#: Fields that the identity excludes: paths (digests of the contents count instead), fields that the position contains,
#: lineage, and options of saving.
_EXCLUDED = (
    "parent", "output", "rollouts", "judged", "selection", "demonstrations", "preferences", "data_position",
    "expert_seed", "reference", "teacher", "max_tokens_per_row", "save_interval", "save_state", "save_hf_checkpoint",
    "max_checkpoints_to_keep", "lineage",
)  # fmt: skip


def training_identity(
    request: TrainRequest, parent_digest: str, data_digest: str, position: Position | None, formats: Sequence[str]
) -> str:
    """Digest of the training. It excludes the number of ranks and ``Layout``, which only affect rounding."""
    settings = {name: value for name, value in asdict(_effective(request)).items() if name not in _EXCLUDED}
    critic = request.algorithm.critic
    folders = (request.reference, request.teacher, None if critic is None else critic.folder)
    models = [None if folder is None else identify(Path(folder)) for folder in folders]
    end = None if position is None else asdict(position)
    plugins = plugins_digest(request.algorithm.plugins)
    return digest_json([settings, parent_digest, data_digest, models, end, plugins, list(formats)])


def _effective(request: TrainRequest) -> TrainRequest:
    """Drop settings that have no effect, such as the end of a constant learning-rate schedule."""
    algorithm, critic = request.algorithm, request.algorithm.critic
    if critic is not None:
        algorithm = replace(algorithm, critic=replace(critic, optimizer=_without_end(critic.optimizer)))
    return replace(request, algorithm=algorithm, optimizer=_without_end(request.optimizer))


def _without_end(optimizer: OptimizerSpec) -> OptimizerSpec:
    return replace(optimizer, total_steps=None) if optimizer.lr_scheduler_type == "constant" else optimizer


Reader = Callable[[str, Path], TrainingRows]


@dataclass(slots=True)
class TrainingPlan:
    """The rows and steps of a request."""

    rows: TrainingRows
    steps: list[np.ndarray]  # indices of the rows of each optimiser step; steps without a gradient are left out
    position: Position | None  # position in the demonstrations or pairs after the last step
    objective: Objective
    identity: str  # equal for requests with the same start state, data and settings
    taken: list[int]  # number of demonstrations or pairs that each step takes from the stream; empty without a stream

    def position_after(self, steps: int) -> Position | None:
        """Position in the demonstrations or pairs after the first ``steps`` steps."""
        if self.position is None:
            return None
        return replace(self.position, rows=self.position.rows - sum(self.taken[steps:]))


_Parts = tuple[TrainingRows, list[np.ndarray], Position | None, list[int]]


class Planner:
    """Makes plans. Caches the last demonstrations and pairs, because consecutive requests often use the same file."""

    def __init__(self) -> None:
        self._cache: dict[Reader, tuple[str, TrainingRows]] = {}

    def plan(
        self,
        request: TrainRequest,
        parent: Path,
        parent_digest: str,
        objective: Objective,
        formats: Sequence[str] = ("float32", "float32"),
    ) -> TrainingPlan:
        """Return the plan of ``request``. Raises UserError or StorageError if its data cannot be used.

        ``formats`` (dtypes of activations and of gradient sums over ranks) are part of the identity.
        """
        _check(request, objective)
        if request.rollouts:
            rows, steps, position, taken = self._rollouts(request, parent, objective)
        elif request.preferences is not None:
            rows, steps, position, taken = self._stream(request, parent, read_preferences, request.preferences)
            if len(rows.samples) != 2 * len(np.unique(rows.group)) and not objective.policy_loss.mismatched:
                raise UserError(
                    f"{request.preferences}: rows with a label have no partner, and the loss "
                    f"{request.algorithm.policy_loss!r} compares the rows of a pair: use 'kto'"
                )
        else:
            assert request.demonstrations is not None, "it was checked that there is something to train on"
            rows, steps, position, taken = self._stream(request, parent, read_demonstrations, request.demonstrations)
        identity = training_identity(request, parent_digest, rows.digest, position, formats)
        return TrainingPlan(rows, steps, position, objective, identity, taken)

    def _stream(self, request: TrainRequest, parent: Path, reader: Reader, file: str) -> _Parts:
        """Plan the requested number of demonstrations or pairs, from where the parent stopped."""
        rows = self._read(reader, file, parent, request.max_tokens_per_row)
        start = _start(request, parent, rows.digest, request.seed)
        count = _stream_count(request, int(rows.group.max()) + 1)
        steps = list(stream_steps(rows.group, request.train_batch_size, request.seed, start, count))
        taken = [min(request.train_batch_size, count - first) for first in range(0, count, request.train_batch_size)]
        return rows, steps, Position(rows.digest, request.seed, start + count), taken

    def _rollouts(self, request: TrainRequest, parent: Path, objective: Objective) -> _Parts:
        rows = read_rollouts(
            request.rollouts,
            request.judged,
            policy_gradient=objective.policy_loss.policy_gradient,
            selection=request.selection,
        )
        steps = list(group_steps(rows.group, request.train_batch_size, request.seed, request.epochs))
        if request.demonstrations is None:
            signal = _signal(rows, objective, request.algorithm)
            return rows, [step for step in steps if signal[step].any()][: request.max_steps], None, []
        return self._mixed(request, parent, rows, steps[: request.max_steps], request.demonstrations)

    def _mixed(
        self, request: TrainRequest, parent: Path, rollouts: TrainingRows, steps: list[np.ndarray], file: str
    ) -> _Parts:
        """Plan demonstrations beside the rollouts of each step, from the position where the parent stopped."""
        experts = self._read(read_demonstrations, file, parent, request.max_tokens_per_row)
        seed = request.seed if request.expert_seed is None else request.expert_seed
        start, count = _start(request, parent, experts.digest, seed), _expert_count(request)
        stream = stream_steps(experts.group, count, seed, start, count * len(steps))
        first = len(rollouts.samples)
        steps = [np.concatenate([step, first + shown]) for step, shown in zip(steps, stream, strict=True)]
        rows = among_rollouts(rollouts, experts, digest_json([rollouts.digest, experts.digest]))
        return rows, steps, Position(experts.digest, seed, start + count * len(steps)), [count] * len(steps)

    def _read(self, reader: Reader, file: str, model_folder: Path, limit: int | None) -> TrainingRows:
        """Read rows of at most ``limit`` tokens. If longer rows are left out, the limit is part of the digest."""
        key = f"{digest_files([file, *map(str, companions(model_folder))])} {limit}"
        if reader not in self._cache or self._cache[reader][0] != key:
            self._cache[reader] = (key, reader(file, model_folder).within(limit, file))
        return self._cache[reader][1]


def _check(request: TrainRequest, objective: Objective) -> None:
    algorithm, loss = request.algorithm, objective.policy_loss
    sources = [bool(request.rollouts), request.demonstrations is not None, request.preferences is not None]
    expected = [True, True, False] if algorithm.expert_weight is not None else None
    if sources != expected if expected else sum(sources) != 1:
        raise UserError(
            "a training takes one of rollouts with their judgements, demonstrations, or preferences; "
            "with an expert weight it takes rollouts and demonstrations"
        )
    if request.preferences is not None and not loss.whole_groups:
        raise UserError(
            f"the loss {algorithm.policy_loss!r} does not compare the rows of a pair: use one that does, such as 'dpo'"
        )
    if algorithm.expert_weight is not None:
        if not loss.experts:
            raise UserError(
                f"the loss {algorithm.policy_loss!r} cannot train on demonstrations mixed with rollouts: use "
                "'mix', or do not set expert_weight"
            )
        _check_mix(request, algorithm.expert_weight)
    needs_reference = objective.needs_reference or algorithm.kl_penalty is not None
    if needs_reference and request.reference is None and request.lora is None:
        raise UserError(
            f"the loss {algorithm.policy_loss!r} with beta {algorithm.beta} needs a reference model: set its folder"
        )
    if loss.teacher and request.teacher is None:
        raise UserError(f"the loss {algorithm.policy_loss!r} needs a teacher: set the folder of its model")


def _check_mix(request: TrainRequest, weight: float) -> None:
    if not 0 <= weight <= 1:
        raise UserError(f"expert_weight is {weight}: expected the experts' share of the loss, from 0 to 1")
    if request.expert_batch_size is not None and request.expert_batch_size < 1:
        raise UserError(f"expert_batch_size is {request.expert_batch_size}: expected at least one demonstration a step")
    if request.algorithm.token_advantage is not None:
        raise UserError(
            f"token advantage {request.algorithm.token_advantage!r} is computed from rewards, which demonstrations "
            "do not have: use an advantage that is computed when a round is judged, such as grpo"
        )


def _start(request: TrainRequest, parent: Path, data_digest: str, seed: int) -> int:
    """Start position in the stream: the request's or, if None, the parent's last position in the same stream."""
    if request.data_position is not None:
        return request.data_position
    reached = read_position(parent)
    same = reached is not None and (reached.data_digest, reached.seed) == (data_digest, seed)
    return reached.rows if reached is not None and same else 0


def _stream_count(request: TrainRequest, groups: int) -> int:
    if request.max_steps is not None:
        return request.max_steps * request.train_batch_size
    return request.epochs * groups


def _expert_count(request: TrainRequest) -> int:
    """Demonstrations per step: the requested number or, if None, their share of the loss times the batch size."""
    share = request.algorithm.expert_weight or 0.0
    count = request.expert_batch_size
    return max(1, round(share * request.train_batch_size)) if count is None else count


def _signal(rows: TrainingRows, objective: Objective, algorithm: AlgorithmSpec) -> np.ndarray:
    """bool [R]: whether the row can have a gradient."""
    inert = objective.zero_advantage_is_inert and algorithm.token_advantage is None
    return np.array([s.loss_mask.any() and not (inert and not np.any(s.advantage)) for s in rows.samples], bool)


def group_steps(group: np.ndarray, batch_size: int, seed: int, epochs: int) -> Iterator[np.ndarray]:
    """Yield the row indices of each step of ``epochs`` passes; rows of one group stay together.

    Groups are shuffled and then distributed in this order. The ``ceil(R / batch_size)`` steps of a pass get numbers of
    rows that are as equal as whole groups allow. So no step has only a few rows, whose gradient would count as much as
    the gradient of a full step.
    """
    rows = len(group)
    for epoch in range(epochs if rows else 0):
        shuffled = _shuffled(group, seed, epoch)
        sizes = np.diff(np.append(_starts(group[shuffled]), rows))
        middle = np.cumsum(sizes) - sizes / 2
        step_of_group = (middle * math.ceil(rows / batch_size) / rows).astype(np.int64)
        step_of_row = np.repeat(step_of_group, sizes)
        yield from np.split(shuffled, _starts(step_of_row)[1:])


def stream_steps(group: np.ndarray, batch_size: int, seed: int, position: int, count: int) -> Iterator[np.ndarray]:
    """Yield the row indices of steps that take ``count`` groups, ``batch_size`` per step, from a shuffled stream.

    The stream is endless; each pass is a new permutation. ``position`` is the number of groups that were already taken:
    the stream continues after these groups.
    """
    order = np.argsort(group, kind="stable")
    starts = np.append(_starts(group[order]), len(group))
    groups = len(starts) - 1
    epoch, permutation = -1, np.empty(0, np.int64)
    for first in range(position, position + count, batch_size):
        taken: list[np.ndarray] = []
        for place in range(first, min(first + batch_size, position + count)):
            if place // groups != epoch:
                epoch = place // groups
                permutation = np.random.default_rng([seed, epoch]).permutation(groups)
            chosen = permutation[place % groups]
            taken.append(order[starts[chosen] : starts[chosen + 1]])
        yield np.concatenate(taken)


def _shuffled(group: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Row indices with the groups in random order; the order within a group is kept."""
    place = np.random.default_rng([seed, epoch]).permutation(int(group.max()) + 1)
    return np.argsort(place[group], kind="stable")


def _starts(values: np.ndarray) -> np.ndarray:
    """Indices at which a new value starts, including the first."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1]))
