"""One line for each setting that is accepted for compatibility but changes nothing here."""

from rft_platform.config.schema import RftConfig

_NO_EFFECT = {
    "cluster.node_num": "one node is used; several are joined by torchrun's own options",
    "model.critic_model_path": "the critic starts from the policy's weights",
    "trainer.trainer_config": "settings of another framework's trainer",
    "trainer.max_checkpoints_to_keep": "every checkpoint is kept",
    "trainer.total_steps": "buffer.total_steps ends the run",
    "evaluation.schedule": "the schedule nightly_evaluation has its own time; change it in the Automation tab",
    "algorithm.kl_penalty_fn": "a KL penalty in the reward is not built yet",
    "synchronizer.sync_style": "rounds are synchronised in the fixed style",
    "explorer.auxiliary_models": "auxiliary models are not served yet",
    "explorer.over_rollout": "every run is waited for",
    "explorer.dynamic_timeout": "explorer.max_timeout bounds every run",
    "trainer.save_hf_checkpoint": "every checkpoint is written in Hugging Face format",
    "buffer.trainer_input.experience_buffer.storage_type": "experiences are kept as files",
}

_VLLM_ONLY = ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")


def config_notices(config: RftConfig, gpu_count: int | None = None) -> list[str]:
    """What the user wrote that has no effect (on a machine with ``gpu_count`` GPUs, where given), one line each."""
    lines = [
        f"{key} has no effect here: {reason}"
        for key, reason in _NO_EFFECT.items()
        if _value(config, key) != _value(_DEFAULT, key)
    ]
    if config.engine.kind == "transformers" or (config.engine.kind == "auto" and gpu_count == 0):
        lines += [
            f"explorer.rollout_model.{key} has no effect with the transformers engine"
            for key in _VLLM_ONLY
            if _value(config.explorer.rollout_model, key) != _value(_DEFAULT.explorer.rollout_model, key)
        ]
    if config.algorithm.kl_loss_fn is not None and config.algorithm.beta == 0:
        lines.append("algorithm.kl_loss_fn has no effect while kl_loss_fn_args.kl_coef is 0")
    lines += [
        f"monitor.monitor_type {name} has no effect here: step metrics go to MLflow"
        for name in config.monitor.monitor_type
        if name != "mlflow"
    ]
    return lines


def _value(section: object, key: str) -> object:
    for name in key.split("."):
        section = getattr(section, name)
    return section


_DEFAULT = RftConfig()
