"""The identity of a training: equal for requests with the same start state, data and settings."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rft_platform.algorithms.plugins import plugins_digest
from rft_platform.algorithms.spec import OptimizerSpec
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


def training_identity(
    request: TrainRequest, parent_digest: str, data_digest: str, position: Position | None, formats: Sequence[str]
) -> str:
    """Digest of the training. It excludes the number of ranks, which only affects rounding."""
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
