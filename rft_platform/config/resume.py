"""Whether a project may go on with a configuration other than the one it was started with."""

from typing import Any

from rft_platform.config.schema import RftConfig
from rft_platform.errors import UserError

#: Settings that change how long, where or how watched a run is, but not what its rounds compute.
FREE = (
    "mode",
    "group",
    "continue_from_checkpoint",
    "cluster",
    "buffer.explorer_input.eval_tasksets",
    "buffer.total_epochs",
    "buffer.total_steps",
    "explorer.service_status_check_interval",
    "explorer.proxy_port",
    "explorer.listen_address",
    "explorer.runner_per_model",
    "explorer.max_timeout",
    "explorer.max_retry_times",
    "explorer.eval_interval",
    "explorer.rollout_model.engine_num",
    "explorer.rollout_model.gpu_memory_utilization",
    "trainer.max_checkpoints_to_keep",
    "trainer.keep_every",
    "trainer.save_interval",
    "trainer.save_hf_checkpoint",
    "trainer.nproc",
    "trainer.rendezvous",
    "trainer.cpu_offload",
    "trainer.gradient_checkpointing",
    "trainer.torch_compile",
    "trainer.idle_timeout_s",
    "trainer.total_steps",
    "synchronizer.sync_timeout",
    "monitor",
    "engine.idle_timeout_s",
    "evaluation",
    "registry.tracking_uri",
)


def check_unchanged(old: RftConfig, new: RftConfig) -> None:
    """Raise ``UserError`` naming every setting that a started project may not change; ``FREE`` ones may."""
    changes = changed_keys(old, new)
    fixed = {key: values for key, values in changes.items() if not _is_free(key)}
    if fixed:
        lines = [f"{key}: was {before!r}, is {after!r}" for key, (before, after) in fixed.items()]
        raise UserError(
            f"project {old.project}/{old.name} was started with other settings; set them back, or give the run another "
            "name:\n" + "\n".join(lines)
        )


def changed_keys(old: RftConfig, new: RftConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> value before and after, for every key that differs."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = dict.fromkeys([*before, *after])
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)
