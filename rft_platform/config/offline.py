"""Offline trainings: mode train on an existing dataset instead of explored experiences."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rft_platform.algorithms.presets import Preset
from rft_platform.config.paths import DATA_SUFFIXES
from rft_platform.config.schema.rft_config import RftConfig

OfflineKind = Literal["sft", "dpo", "distill"]

_PATH = "buffer.trainer_input.experience_buffer.path"
_WANTED = {
    "sft": "demonstrations: a column messages, or prompt with response (or completion)",
    "dpo": "preference pairs: columns prompt, chosen and rejected; or, for kto, prompt, completion and label",
    "distill": "conversations for learning the teacher's distribution: columns messages, or prompt with response",
}


def offline_kind(config: RftConfig, preset: Preset) -> OfflineKind | None:
    """The kind of offline training that the configuration requests; None: the run trains on explored rounds.

    ``gkd`` supports both: with mode train and a dataset, it trains offline on that dataset.
    """
    if config.mode != "train":
        return None
    if preset.trains_on == "preferences":
        return "dpo"
    distils = preset.teacher and preset.token_advantage is None
    if preset.trains_on == "demonstrations":
        return "distill" if distils else "sft"
    return "distill" if distils and config.buffer.trainer_input.experience_buffer.path is not None else None


def offline_problems(config: RftConfig, preset: Preset) -> Iterator[str]:
    """One line for each setting that is invalid for an offline training or an algorithm that only trains offline."""
    kind, algorithm = offline_kind(config, preset), config.algorithm.algorithm_type
    if kind is None:
        if preset.trains_on != "rollouts":
            yield (
                f"algorithm.algorithm_type {algorithm} trains on {preset.trains_on} and mode {config.mode} explores: "
                f"set mode: train and {_PATH}"
            )
        return
    yield from _data_problems(config, kind)
    if config.warm_start is not None:
        yield f"warm_start: {algorithm} in mode train starts from model.model_path; remove the section"
    if kind == "distill" and config.algorithm.teacher_model_path is None:
        yield (
            f"algorithm.teacher_model_path is not set: {algorithm} learns from a teacher; give its "
            "folder or Hugging Face name"
        )
    steps = config.offline_steps
    if steps is not None and config.algorithm.optimizer.lr_warmup_steps > steps:
        yield (
            f"algorithm.optimizer.lr_warmup_steps {config.algorithm.optimizer.lr_warmup_steps} exceeds the {steps} "
            "steps of the run"
        )


def _data_problems(config: RftConfig, kind: OfflineKind) -> Iterator[str]:
    buffer = config.buffer.trainer_input.experience_buffer
    if buffer.path is None:
        yield f"{_PATH} is not set: {config.algorithm.algorithm_type} needs {_WANTED[kind]}"
        return
    local = Path(buffer.path).is_absolute() or buffer.path.endswith(DATA_SUFFIXES) or buffer.path.count("/") > 1
    if local and not Path(buffer.path).exists():
        yield f"{_PATH} {buffer.path}: no such file or folder; give {_WANTED[kind]}"
    if buffer.storage_type != "file":
        yield (
            f"buffer.trainer_input.experience_buffer.storage_type {buffer.storage_type}: a dataset "
            "is read from files; remove it"
        )
    if buffer.replay_buffer.enable:
        yield (
            "buffer.trainer_input.experience_buffer.replay_buffer: an offline training passes over its rows "
            "buffer.total_epochs times; leave it out"
        )
