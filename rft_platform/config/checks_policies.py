"""Checks of section ``policies``: unique names, and settings that do not support several policies yet."""

from collections.abc import Iterator

from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema import RftConfig

#: Names of folders that lie beside the folders of policies.
_TAKEN = ("aside", "intermediate", "warm_start")


def policies_problems(run: RunSettings) -> Iterator[str]:
    """One line for each invalid name and for each setting that does not support several policies."""
    config = run.config
    if not config.policies:
        return
    yield from _name_problems(config)
    for key, is_set, instead in _unsupported(run):
        if is_set:
            yield f"{key} does not go with policies: {instead}"
    taskset = config.buffer.explorer_input.taskset
    if taskset is not None and ":" not in taskset.workflow:
        yield (
            f"buffer.explorer_input.taskset.workflow {taskset.workflow} calls the first policy alone, so the policies "
            f"{', '.join(policy.name for policy in config.policies)} would learn nothing: name a workflow of your own"
        )


def _name_problems(config: RftConfig) -> Iterator[str]:
    names = [policy.name for policy in config.policies]
    auxiliary = {entry.known_as.lower() for entry in config.explorer.auxiliary_models}
    for index, name in enumerate(names):
        key = f"policies[{index}].name {name!r}"
        if names.index(name) < index:
            yield f"{key} is the name of another policy too; give each a name of its own"
        if name in auxiliary:
            yield f"{key} is the name of an auxiliary model too; give one of them another name"
        if name in _TAKEN or name.startswith("global_step_"):
            yield f"{key} is what a folder of checkpoints is called; give it another name"


def _unsupported(run: RunSettings) -> list[tuple[str, bool, str]]:
    """Key, whether it is set, and how to fix it."""
    config, preset = run.config, run.algorithm
    sync, algorithm = config.synchronizer, config.algorithm
    kind = f"algorithm.algorithm_type {algorithm.algorithm_type}"
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    return [
        (f"mode {config.mode}", config.mode != "both", "set it to both"),
        ("warm_start", config.warm_start is not None, "warm each model up in a project of its own, and start from it"),
        ("model.lora_configs", bool(config.model.lora_configs), "train full weights"),
        (f"synchronizer.sync_style {sync.sync_style}", sync.dynamic, "set it to fixed"),
        ("buffer.trainer_input.experience_buffer.replay_buffer.enable", replay, "set it to false"),
        (kind, run.offline is not None, "an offline training has one"),
        (kind, preset.critic, "take an algorithm without a critic"),
        (kind, preset.teacher, "take an algorithm without a teacher"),
        (kind, preset.experts, "take an algorithm without demonstrations"),
        ("dynamic sampling", run.batches.max_batches > 1, "switch it off"),
    ]
