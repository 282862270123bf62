"""The identity of a training: equal for requests with the same start state, data and settings."""

from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rft_platform.algorithms.plugins import plugins_digest
from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.common.files import digest_json
from rft_platform.training.checkpoint.manifest import identify
from rft_platform.training.checkpoint.reading import Position
from rft_platform.training.protocol import TrainRequest

#: Fields that the identity excludes: paths (digests of the contents count instead), lineage, and options of saving.
_EXCLUDED = (
    "parent", "output", "rollouts", "judged", "selection", "demonstrations", "preferences", "data_position",
    "reference", "teacher", "max_tokens_per_row", "save_interval", "save_state", "save_hf_checkpoint",
    "max_checkpoints_to_keep", "lineage",
)  # fmt: skip

#: Fields that earlier versions of the platform did not have. The identity excludes them while they have their default
#: values: otherwise a training that an earlier version started could not be repeated after an upgrade. Every new field
#: of a request or of a specification in it belongs here.
_ADDED: dict[type, tuple[str, ...]] = {
    TrainRequest: ("steps_before",),
    AlgorithmSpec: ("row_mask_ratio", "token_veto", "weight_level", "weight_bound", "expert_schedule"),
}


def training_identity(
    request: TrainRequest, parent_digest: str, data_digest: str, position: Position | None, formats: Sequence[str]
) -> str:
    """Digest of the training. It excludes the number of ranks, which only affects rounding."""
    settings = {name: value for name, value in _values(_effective(request)).items() if name not in _EXCLUDED}
    critic = request.algorithm.critic
    folders = (request.reference, request.teacher, None if critic is None else critic.folder)
    models = [None if folder is None else identify(Path(folder)) for folder in folders]
    end = None if position is None else asdict(position)
    plugins = plugins_digest(request.algorithm.plugins)
    return digest_json([settings, parent_digest, data_digest, models, end, plugins, list(formats)])


def _values(value: Any) -> Any:
    """``value`` as ``dataclasses.asdict`` returns it, without the fields of ``_ADDED`` that have their default."""
    if not is_dataclass(value):
        return value
    added = _ADDED.get(type(value), ())
    given = [(field, getattr(value, field.name)) for field in fields(value)]
    return {field.name: _values(v) for field, v in given if field.name not in added or v != field.default}


def _effective(request: TrainRequest) -> TrainRequest:
    """Drop settings that have no effect, such as the end of a constant learning-rate schedule."""
    algorithm, critic = request.algorithm, request.algorithm.critic
    if critic is not None:
        algorithm = replace(algorithm, critic=replace(critic, optimizer=_without_end(critic.optimizer)))
    return replace(request, algorithm=algorithm, optimizer=_without_end(request.optimizer))


def _without_end(optimizer: OptimizerSpec) -> OptimizerSpec:
    return replace(optimizer, total_steps=None) if optimizer.lr_scheduler_type == "constant" else optimizer
