"""Check whether a started project may continue with a changed configuration."""

import re
from collections.abc import Sequence
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.paths import seen_from
from rft_platform.config.schema.buffer import MODEL_JUDGES, PATIENCE
from rft_platform.config.schema.rft_config import RftConfig

_SERVING = (  # how a model is distributed over processes and GPUs
    "engine_num",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "enable_sleep_mode",
    "enforce_eager",
    "enable_prefix_caching",
)

#: Settings that a started project may change: length, hardware, time-outs and monitoring. No setting that changes the
#: result of a round is among them. ``[]`` stands for any entry of a list.
FREE = (
    "mode",
    "group",
    "continue_from_checkpoint",
    "store_url",
    "cluster",
    "buffer.explorer_input.eval_tasksets",
    "buffer.explorer_input.taskset.judge_timeout_s",
    "buffer.explorer_input.taskset.max_abs_reward",
    "buffer.explorer_input.tasksets[].judge_timeout_s",
    "buffer.explorer_input.tasksets[].max_abs_reward",
    "buffer.total_epochs",
    "buffer.total_steps",
    "buffer.trainer_input.experience_buffer.storage_type",
    "explorer.service_status_check_interval",
    "explorer.proxy_port",
    "explorer.listen_address",
    "explorer.runner_per_model",
    "explorer.max_timeout",
    "explorer.max_retry_times",
    "explorer.dynamic_timeout",
    "explorer.over_rollout.wait_after_min",
    "explorer.workers",
    "explorer.eval_interval",
    "explorer.eval_on_startup",
    *(f"explorer.rollout_model.{key}" for key in _SERVING),
    *(f"explorer.auxiliary_models[].{key}" for key in _SERVING),
    *(f"explorer.auxiliary_models[].{key}" for key in ("base_url", "api_key_env", "timeout_s", "max_concurrency")),
    "trainer.max_checkpoints_to_keep",
    "trainer.keep_every",
    "trainer.save_interval",
    "trainer.save_in_background",
    "trainer.save_hf_checkpoint",
    "trainer.nproc",
    "trainer.rendezvous",
    "trainer.cpu_offload",
    "trainer.gradient_checkpointing",
    "trainer.torch_compile",
    "trainer.max_token_len_per_gpu",
    "trainer.threads",
    "trainer.idle_timeout_s",
    "trainer.heartbeat_timeout_s",
    "trainer.total_steps",
    "synchronizer.sync_method",
    "synchronizer.sync_timeout",
    "monitor",
    "engine.idle_timeout_s",
    "engine.heartbeat_timeout_s",
    "engine.threads",
    "engine.python",
    "engine.urls",
    "engine.token_env",
    "engine.kv_cache_gb",
    "explorer.engines_per_gpu",
    "evaluation",
    "prompt_search",
    "service",
    "registry.tracking_uri",
    "registry.upload_max_gb",
)


def check_unchanged(old: RftConfig, new: RftConfig) -> None:
    """Raise ``UserError`` if a setting changed that a started project may not change; the error lists all of them.

    Only the settings of ``FREE`` and ``PATIENCE`` may change.
    """
    changes, free = changed_keys(old, new), (*FREE, *_patience(new))
    fixed = {key: values for key, values in changes.items() if not _is_among(key, free)}
    if fixed:
        lines = [f"{key}: was {before!r}, is {after!r}" for key, (before, after) in fixed.items()]
        raise UserError(
            f"project {old.project}/{old.name} was started with other settings: restore the previous values, or start "
            "a new run: set `name` and use another RFT_HOME (its model.model_path may be a checkpoint of this one). "
            "The code of a judge or workflow may change; these settings may not:\n" + "\n".join(lines)
        )


def relocated(old: RftConfig, new: RftConfig) -> RftConfig:
    """``old`` with the paths of ``new`` that are the same in the user's file: its folder was moved, renamed or mounted.

    A path is the same if it is equal relative to the folder of the file.
    """
    if old.folder is None or new.folder is None or old.folder == new.folder:
        return old
    before, after = (config.model_dump(mode="json") for config in (old, new))
    moved = _moved(before, after, seen_from(before, old.folder), seen_from(after, new.folder))
    return old if moved == before else RftConfig.model_validate(moved).in_folder(new.folder)


def _moved(old: Any, new: Any, old_seen: Any, new_seen: Any) -> Any:
    """``old``, with each value of ``new`` that differs from it but is seen as the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        known = {name: (old[name], new[name], old_seen[name], new_seen[name]) for name in old if name in new}
        return {**old, **{name: _moved(*values) for name, values in known.items()}}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [_moved(*values) for values in zip(old, new, old_seen, new_seen, strict=True)]
    return new if old_seen == new_seen else old


def changed_keys(old: RftConfig, new: RftConfig) -> dict[str, tuple[Any, Any]]:
    """Map the dotted key of each setting that differs to its values before and after."""
    before, after = flat_settings(old), flat_settings(new)
    keys = dict.fromkeys([*before, *after])
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def flat_settings(config: RftConfig) -> dict[str, Any]:
    """Map every setting's dotted key to its value."""
    return flat(config.model_dump(mode="json"))


def _patience(config: RftConfig) -> list[str]:
    """The dotted keys of the arguments in ``PATIENCE`` (time-outs, retries, ...) of the tasksets' model judges."""
    arguments: list[str] = []
    for key, taskset in config.buffer.explorer_input.explored.items():
        if taskset.judge is None or isinstance(taskset.judge, str):
            arguments += [f"{key}.judge_args"] if taskset.judge in MODEL_JUDGES else []
        else:
            places = [index for index, part in enumerate(taskset.judge) if part.judge in MODEL_JUDGES]
            arguments += [f"{key}.judge[{index}].args" for index in places]
    return [f"{place}.{name}" for place in arguments for name in PATIENCE]


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Map dotted keys to values. The entries of a list of mappings get the keys ``key[0]``, ``key[1]``, ...

    A list of other values stays one value.
    """
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        inside = {f"{prefix}[{index}]": entry for index, entry in enumerate(value)}
    elif isinstance(value, dict) and value:
        inside = {f"{prefix}.{key}" if prefix else str(key): inner for key, inner in value.items()}
    else:
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for key, inner in inside.items():
        found |= flat(inner, key)
    return found


def _is_among(key: str, free: Sequence[str]) -> bool:
    """Whether ``key``, or a section that contains it, is one of ``free``."""
    names = (key, re.sub(r"\[\d+\]", "[]", key))
    return any(name == one or name.startswith((f"{one}.", f"{one}[")) for name in names for one in free)
