"""Notices: one line for each accepted setting that has no effect."""

from rft_platform.config.checks_explorer import explorer_notices
from rft_platform.config.schema import RftConfig

_NO_EFFECT = {
    "trainer.trainer_config": "settings of another framework's trainer",
    "evaluation.schedule": "the schedule nightly_evaluation has its own time; change it in the Automation tab",
    "synchronizer.sync_method": "weights travel as checkpoint files, which the engine loads in place",
    "synchronizer.sync_timeout": "a phase starts when what it needs is there, and the wait for that has no limit",
    "buffer.trainer_input.experience_buffer.storage_type": "experiences are kept as files",
}

_VLLM_ONLY = ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")


def config_notices(config: RftConfig, gpu_count: int | None = None) -> list[str]:
    """One line for each setting of the user that has no effect (on a machine with ``gpu_count`` GPUs, if given)."""
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
    if config.algorithm.kl_loss_fn == "k1" and config.algorithm.beta:
        lines.append("algorithm.kl_loss_fn k1 has no gradient in expectation as a loss: k2 has the gradient of the KL")
    if config.algorithm.kl_penalty_fn is not None and config.algorithm.kl_penalty_fn_args.kl_coef == 0:
        lines.append("algorithm.kl_penalty_fn has no effect while kl_penalty_fn_args.kl_coef is 0")
    if gpu_count == 0 and config.cluster.gpu_per_node:
        lines.append(f"cluster.gpu_per_node {config.cluster.gpu_per_node}: there is no GPU here, processors compute")
    if config.cluster.node_num > 1 and config.trainer.rendezvous.endpoint is None:
        lines.append("cluster.node_num has no effect on training here while trainer.rendezvous.endpoint is not set")
    if config.trainer.gradient_accumulation_steps > 1 and config.buffer.train_batch_size in (None, "round"):
        lines.append("trainer.gradient_accumulation_steps has no effect: a step takes a whole explore batch already")
    for index, taskset in enumerate(config.buffer.explorer_input.eval_tasksets):
        if taskset.task_selector != type(taskset.task_selector)():
            key = f"buffer.explorer_input.eval_tasksets[{index}].task_selector"
            lines.append(f"{key} has no effect here: an evaluation runs every task")
    lines += explorer_notices(config)
    if "wandb" in config.monitor.monitor_type:
        lines.append("monitor.monitor_type wandb has no effect here: step metrics go to MLflow and TensorBoard")
    return lines


def _value(section: object, key: str) -> object:
    for name in key.split("."):
        section = getattr(section, name)
    return section


_DEFAULT = RftConfig()
