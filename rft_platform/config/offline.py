"""Offline trainings: mode train on an existing dataset instead of explored experiences."""

from typing import Literal

from rft_platform.algorithms.presets import Preset
from rft_platform.config.schema.rft_config import RftConfig

OfflineKind = Literal["sft", "dpo", "distill"]


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
