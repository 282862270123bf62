"""Convert the settings of TRL's GRPO trainer (``GRPOConfig`` as YAML or JSON) to sections of ``rft.yaml``.

Keys and defaults are those of TRL 1.x (https://huggingface.co/docs/trl/grpo_trainer).
"""

from collections.abc import Iterator
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.foreign.treatments import Data, Moved, Noted, Refused, Treatment, apply, put

#: Keys by which a file is recognised: no section of our schema has these names.
_MARKS = {"num_generations", "per_device_train_batch_size", "max_completion_length", "gradient_accumulation_steps"}
_LOSSES = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_SCALES: dict[Any, dict[str, Any]] = {
    "group": {"normalize_std": True},
    True: {"normalize_std": True},
    "batch": {"std_level": "batch"},
    "none": {"normalize_std": False},
    False: {"normalize_std": False},
}
_OWN_LOGS = "metrics go to MLflow and TensorBoard; rows are stored with every round (monitor)"

_KEYS: tuple[tuple[str, Treatment], ...] = (
    ("model_name_or_path", Moved("model.model_path")),
    ("learning_rate", Moved("algorithm.optimizer.lr")),
    ("weight_decay", Moved("algorithm.optimizer.weight_decay")),
    ("adam_epsilon", Moved("algorithm.optimizer.eps")),
    ("max_grad_norm", Moved("algorithm.optimizer.clip_grad")),
    ("lr_scheduler_type", Moved("algorithm.optimizer.lr_scheduler_type", {"constant_with_warmup": "constant"})),
    ("warmup_steps", Moved("algorithm.optimizer.lr_warmup_steps")),
    ("warmup_ratio", Noted("set algorithm.optimizer.lr_warmup_steps, in optimiser steps", silent=(0, 0.0))),
    ("num_generations", Moved("algorithm.repeat_times")),
    ("num_iterations", Moved("algorithm.epochs")),
    ("max_completion_length", Moved("model.max_response_tokens")),
    ("max_prompt_length", Moved("model.max_prompt_tokens")),
    ("temperature", Moved("model.temperature")),
    ("top_p", Moved("model.top_p")),
    ("top_k", Moved("model.top_k", {0: -1})),
    ("max_steps", Moved("trainer.total_steps", {-1: None})),
    ("num_train_epochs", Moved("buffer.total_epochs")),
    ("gradient_checkpointing", Moved("trainer.gradient_checkpointing")),
    ("torch_compile", Moved("trainer.torch_compile")),
    ("save_steps", Moved("trainer.save_interval")),
    ("save_total_limit", Moved("trainer.max_checkpoints_to_keep")),
    ("seed", Moved("seed")),
    ("run_name", Moved("name")),
    ("use_vllm", Moved("engine.kind", {True: "vllm", False: "transformers"})),
    ("vllm_gpu_memory_utilization", Moved("explorer.rollout_model.gpu_memory_utilization")),
    ("vllm_tensor_parallel_size", Moved("explorer.rollout_model.tensor_parallel_size")),
    ("vllm_max_model_length", Moved("model.max_model_len")),
    ("bf16", Moved("trainer.dtype", {True: "bfloat16", False: "float32"})),
    ("fp16", Refused("the trainer computes in bfloat16 or float32: set bf16", allowed=(False,))),
    ("use_liger_kernel", Noted("the head is computed in chunks with fused kernels in any case")),
    ("use_liger_loss", Noted("the head is computed in chunks with fused kernels in any case")),
    ("vllm_mode", Noted("the engine is a process of its own; on one GPU it shares the memory with the trainer")),
    ("vllm_enable_sleep_mode", Noted("the engine keeps its share of the memory (gpu_memory_utilization)")),
    ("output_dir", Noted("a project's files are below RFT_HOME (checkpoint_root_dir: checkpoints elsewhere)")),
    ("dataset_name", Moved("buffer.explorer_input.taskset.path")),
    ("dataset_config", Moved("buffer.explorer_input.taskset.subset_name")),
    ("remove_unused_columns", Noted("workflows and judges receive the whole row of the dataset", silent=(False,))),
    ("shuffle_dataset", Noted("taskset.task_selector orders the tasks; the default shuffles them", silent=(True,))),
    ("reward_weights", Noted("give weights to the judges: taskset.judge as a list")),
    ("mask_truncated_completions", Noted("algorithm.filters and judges decide about truncated runs", silent=(False,))),
    ("report_to", Noted(_OWN_LOGS)),
    ("logging_steps", Noted(_OWN_LOGS)),
    ("log_completions", Noted(_OWN_LOGS)),
    ("ddp_timeout", Noted("the trainer's ranks are started by the platform (trainer.nproc)")),
    ("deepspeed", Refused("layers are sharded by FSDP2: set trainer.nproc, and leave this key out")),
    ("fsdp", Noted("layers are sharded by FSDP2 in any case (trainer.nproc)")),
)


def is_trl(data: Data) -> bool:
    """Whether a file has keys of ``GRPOConfig``."""
    return bool(_MARKS & data.keys())


def convert_trl(data: Data, source: str) -> tuple[Data, tuple[str, ...]]:
    """Sections of ``rft.yaml`` with the same settings, and one line for each setting that has no equal here.

    Defaults of TRL that differ from ours are written out. Raises UserError for a setting that cannot be supported.
    """
    settings: Data = {"project": "converted", "name": "from_trl", **_with_defaults(data)}
    try:
        notices = [*_batches(settings), *_algorithm(settings)]
        for key, treatment in _KEYS:
            notices += apply(settings, key, treatment)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    for key in sorted(data.keys() & settings.keys() - {"seed", "name"}):
        del settings[key]
        notices.append(f"{key} has no equivalent here and was left out")
    return settings, tuple(notices)


def _with_defaults(data: Data) -> Data:
    """``data`` with those defaults of TRL that differ from ours."""
    defaults: Data = {
        "num_generations": 8, "max_completion_length": 256, "temperature": 1.0, "num_train_epochs": 3,
        "lr_scheduler_type": "linear", "gradient_checkpointing": True, "weight_decay": 0.0,
    }  # fmt: skip
    if (data.get("max_steps") or -1) > 0:
        del defaults["num_train_epochs"]
    return defaults | data


def _batches(settings: Data) -> Iterator[str]:
    """TRL counts completions of one device; the platform counts tasks of a round and experiences of a step."""
    device = settings.pop("per_device_train_batch_size", 8)
    step = device * settings.pop("gradient_accumulation_steps", 1)
    generated = settings.pop("generation_batch_size", None)
    rounds = settings.pop("steps_per_generation", None)
    generated = generated or (device * rounds if rounds else step)
    group = settings["num_generations"]
    if generated % group:
        raise UserError(f"{generated} completions per generation are no multiple of num_generations {group}")
    put(settings, "buffer.batch_size", generated // group, "the batch size")
    put(settings, "buffer.train_batch_size", step, "the batch size of a step")
    yield (
        f"buffer.batch_size {generated // group} and buffer.train_batch_size {step} are those of one device: multiply "
        "both by the number of processes of the TRL run"
    )


def _algorithm(settings: Data) -> Iterator[str]:
    """The loss, its clip range, the advantage's scale and the KL term."""
    level = settings.pop("importance_sampling_level", "token")
    if level not in ("token", "sequence"):
        raise UserError(f"importance_sampling_level {level!r}: expected token or sequence")
    kind = settings.pop("loss_type", "dapo")
    if kind not in _LOSSES:
        raise UserError(f"loss_type {kind!r}: expected one of {', '.join(_LOSSES)}; see docs/algorithms.md for others")
    low = settings.pop("epsilon", 0.2)
    high = settings.pop("epsilon_high", None) or low
    algorithm: Data = {"algorithm_type": "gspo" if level == "sequence" else "grpo"}
    clip: Data = {"clip_low": low, "clip_high": high}
    delta = settings.pop("delta", None)
    if level == "sequence":
        yield "gspo averages over rows: loss_type has no effect"
    else:
        algorithm["loss_agg_mode"] = _LOSSES[kind]
        clip["dual_clip"] = delta
    algorithm["policy_loss_fn_args"] = clip
    scale = settings.pop("scale_rewards", "group")
    if scale not in _SCALES:
        raise UserError(f"scale_rewards {scale!r}: expected group, batch or none")
    algorithm["advantage_fn_args"] = dict(_SCALES[scale])
    if beta := settings.pop("beta", 0.0):
        algorithm |= {"kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": beta}}
    betas = [settings.pop("adam_beta1", 0.9), settings.pop("adam_beta2", 0.999)]
    algorithm["optimizer"] = {"betas": betas}
    settings["algorithm"] = algorithm
