"""One line for each setting that is accepted for compatibility but changes nothing here."""

from rft_platform.config.schema import RftConfig

_NO_EFFECT = {
    "trainer.trainer_config": "settings of another framework's trainer",
    "evaluation.schedule": "the schedule nightly_evaluation has its own time; change it in the Automation tab",
    "synchronizer.sync_style": "rounds are synchronised in the fixed style",
    "explorer.auxiliary_models": "auxiliary models are not served yet",
    "explorer.over_rollout": "every run is waited for",
    "explorer.dynamic_timeout": "explorer.max_timeout bounds every run",
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
    if config.trainer.total_steps is not None and config.mode != "train":
        lines.append("trainer.total_steps has no effect here: buffer.total_steps ends the run")
    if config.algorithm.kl_loss_fn is not None and config.algorithm.beta == 0:
        lines.append("algorithm.kl_loss_fn has no effect while kl_loss_fn_args.kl_coef is 0")
    if config.algorithm.kl_loss_fn == "k1" and config.algorithm.beta:
        lines.append("algorithm.kl_loss_fn k1 has no gradient in expectation as a loss: k2 has the gradient of the KL")
    if config.algorithm.kl_penalty_fn is not None and config.algorithm.kl_penalty_fn_args.kl_coef == 0:
        lines.append("algorithm.kl_penalty_fn has no effect while kl_penalty_fn_args.kl_coef is 0")
    if config.cluster.node_num > 1 and config.trainer.rendezvous.endpoint is None:
        lines.append("cluster.node_num has no effect on training here while trainer.rendezvous.endpoint is not set")
    if config.trainer.gradient_accumulation_steps > 1 and config.buffer.train_batch_size is None:
        lines.append("trainer.gradient_accumulation_steps has no effect: a step takes a whole explore batch already")
    if "wandb" in config.monitor.monitor_type:
        lines.append("monitor.monitor_type wandb has no effect here: step metrics go to MLflow and TensorBoard")
    return lines


def _value(section: object, key: str) -> object:
    for name in key.split("."):
        section = getattr(section, name)
    return section


_DEFAULT = RftConfig()
