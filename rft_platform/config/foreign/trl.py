"""Convert the settings of TRL's GRPO trainer (``GRPOConfig`` as YAML or JSON) to sections of ``rft.yaml``.

Keys and defaults are those of TRL 1.x (https://huggingface.co/docs/trl/grpo_trainer). The YAML of the command
``trl grpo`` also has the keys of ``ModelConfig`` and ``ScriptArguments``.
"""

import difflib
from collections.abc import Iterator
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.config.foreign.treatments import Data, Moved, Noted, Refused, Treatment, apply, put

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
    ("vllm_mode", Noted("the engine is a separate process; on one GPU it shares the memory with the trainer")),
    ("vllm_enable_sleep_mode", Noted("the memory plan decides whether the engine sleeps", silent=(False,))),
    ("output_dir", Noted("a project's files are below RFT_HOME (checkpoint_root_dir: checkpoints elsewhere)")),
    ("dataset_name", Moved("buffer.explorer_input.taskset.path")),
    ("dataset_config", Moved("buffer.explorer_input.taskset.subset_name")),
    ("dataset_train_split", Moved("buffer.explorer_input.taskset.split")),
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
    ("load_in_4bit", Refused("base weights are not quantised: leave this key out", allowed=(False,))),
    ("load_in_8bit", Refused("base weights are not quantised: leave this key out", allowed=(False,))),
    ("lora_dropout", Noted("an adapter is trained without dropout", silent=(0, 0.0))),
    ("lora_task_type", Noted("the adapter is one of a causal language model", silent=("CAUSAL_LM",))),
    ("lora_modules_to_save", Refused("only the adapter is trained: leave this key out")),
    ("lora_target_parameters", Refused("name linear layers in lora_target_modules")),
    ("use_dora", Refused("an adapter is a plain LoRA: leave this key out", allowed=(False,))),
    ("use_rslora", Refused(
        "the scale of an adapter is lora_alpha / lora_r: leave this key out, and multiply lora_alpha by sqrt(lora_r)",
        allowed=(False,),
    )),
)  # fmt: skip

#: Keys that ``_batches``, ``_algorithm`` and ``_adapter`` read.
_READ = (
    "per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation loss_type "
    "importance_sampling_level epsilon epsilon_high delta scale_rewards beta adam_beta1 adam_beta2 use_peft lora_r "
    "lora_alpha lora_target_modules"
)
#: Of these, those that the conversion computes with.
_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
_COUNTS_OR_NULL = ("generation_batch_size", "steps_per_generation")
#: Keys of GRPOConfig, TrainingArguments, ModelConfig and ScriptArguments that have no equivalent here.
_WITHOUT_EQUIVALENT = """
    accelerator_config attn_implementation auto_find_batch_size average_tokens_across_devices batch_eval_metrics
    bf16_full_eval bnb_4bit_quant_storage bnb_4bit_quant_type cache_implementation cast_lm_head_to_fp32
    chat_template_kwargs data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
    dataset_streaming dataset_test_split datasets ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph debug disable_dropout disable_tqdm do_eval do_predict
    do_train ds3_gather_for_generation dtype enable_jit_checkpoint entropy_coef entropy_coef_delta entropy_coef_max
    entropy_coef_min entropy_target eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps
    eval_strategy eval_use_gather_object fp16_full_eval fsdp_config full_determinism generation_kwargs
    gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
    hub_strategy hub_token ignore_bias_buffers ignore_data_skip include_for_metrics include_num_input_tokens_seen
    label_names label_smoothing_factor length_column_name liger_kernel_config load_best_model_at_end local_rank
    log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts logging_dir
    logging_first_step logging_nan_inf_filter logging_strategy lr_scheduler_kwargs max_tool_calling_iterations
    metric_for_best_model min_p model_init_kwargs model_revision multi_objective_aggregation neftune_noise_alpha
    num_completions_to_print num_generations_eval off_policy_mask_threshold optim optim_args optim_target_modules
    pad_to_multiple_of parallelism_config per_device_eval_batch_size prediction_loss_only push_to_hub
    ref_model_mixup_alpha ref_model_sync_steps repetition_penalty restore_callback_states_from_checkpoint
    resume_from_checkpoint reward_funcs reward_model_name_or_path router_aux_loss_coef sapo_temperature_neg
    sapo_temperature_pos save_on_each_node save_only_model save_strategy skip_memory_metrics streaming sync_ref_model
    test_split_size tf32 top_entropy_quantile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy
    transformers_continuous_batching_config trust_remote_code use_adaptive_entropy use_bias_correction_kl
    use_bnb_nested_quant use_cache use_cpu use_transformers_continuous_batching use_transformers_paged
    vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_group_port vllm_importance_sampling_cap
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_structured_outputs_regex
"""


def is_trl(data: Data) -> bool:
    """Whether a file has keys of ``GRPOConfig`` that are no keys of ours."""
    return bool(data.keys() & {*(key for key, _ in _KEYS), *_READ.split()} - {"seed"})


def convert_trl(data: Data, source: str) -> tuple[Data, tuple[str, ...]]:
    """Sections of ``rft.yaml`` with the same settings, and one line for each setting that has no equal here.

    Defaults of TRL that differ from ours are written out. Raises UserError for a setting that cannot be supported.
    """
    try:
        _check_numbers(data)
        settings: Data = {"project": "converted", "name": None, **_with_defaults(data)}
        unknown = _unknown(data)
        notices = [*_batches(settings), *_algorithm(settings), *_schedule(settings), *_adapter(settings)]
        for key, treatment in _KEYS:
            notices += apply(settings, key, treatment)
    except UserError as error:
        raise UserError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from None
    for key in sorted(data.keys() & ({*_WITHOUT_EQUIVALENT.split()} | unknown), key=str):
        del settings[key]
        reason = "is no known key of TRL's GRPOConfig" if key in unknown else "has no equivalent here"
        notices.append(f"{key} {reason} and was left out")
    settings["name"] = settings.get("name") or "from_trl"
    return settings, tuple(notices)


def _unknown(data: Data) -> set[Any]:
    """The keys that are not known as those of TRL. Raises UserError if one is similar to a known key."""
    known = {key for key, _ in _KEYS} | {*_READ.split(), *_WITHOUT_EQUIVALENT.split(), "project"}
    unknown = set(data.keys() - known)
    near = {
        key: difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.8) for key in sorted(unknown, key=str)
    }
    if similar := [f"unknown key {key}; did you mean {found[0]}?" for key, found in near.items() if found]:
        raise UserError("\n".join(similar))
    return unknown


def _check_numbers(data: Data) -> None:
    """Raise UserError for a count that is none: the conversion computes with these settings."""
    for key in sorted(data.keys() & {*_COUNTS, *_COUNTS_OR_NULL, "max_steps"}):
        value, any_length = data[key], key == "max_steps"
        if value is None and key not in _COUNTS:
            continue
        if type(value) is not int or (value < 1 and not any_length):
            expected = "a whole number" + (", or -1 for no limit" if any_length else " above 0")
            raise UserError(f"{key} {value!r}: expected {expected}")


def _with_defaults(data: Data) -> Data:
    """``data`` with those defaults of TRL that differ from ours."""
    defaults: Data = {
        "num_generations": 8, "max_completion_length": 256, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "gradient_checkpointing": True,
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
    if not isinstance(kind, str) or kind not in _LOSSES:
        raise UserError(f"loss_type {kind!r}: expected one of {', '.join(_LOSSES)}; see docs/algorithms.md for others")
    low = settings.pop("epsilon", 0.2)
    high = settings.pop("epsilon_high", None) or low
    algorithm: Data = {"algorithm_type": "gspo" if level == "sequence" else "grpo"}
    clip: Data = {"clip_low": low, "clip_high": high}
    delta = settings.pop("delta", None)
    if level == "sequence":
        yield "gspo averages over rows: loss_type has no effect"
        if delta is not None:
            yield f"delta {delta} has no effect here: gspo has no second bound of the ratio"
    else:
        algorithm["loss_agg_mode"] = _LOSSES[kind]
        clip["dual_clip"] = delta
    algorithm["policy_loss_fn_args"] = clip
    scale = settings.pop("scale_rewards", "group")
    if not isinstance(scale, str | bool) or scale not in _SCALES:
        raise UserError(f"scale_rewards {scale!r}: expected group, batch or none")
    algorithm["advantage_fn_args"] = dict(_SCALES[scale])
    if beta := settings.pop("beta", 0.0):
        algorithm |= {"kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": beta}}
    betas = [settings.pop("adam_beta1", 0.9), settings.pop("adam_beta2", 0.999)]
    algorithm["optimizer"] = {"betas": betas}
    settings["algorithm"] = algorithm


def _schedule(settings: Data) -> Iterator[str]:
    """Keep the learning rate constant if its decay has no known end: only ``max_steps`` says when TRL's run ends."""
    kind = settings["lr_scheduler_type"]
    if kind in ("linear", "cosine") and (settings.get("max_steps") or -1) <= 0:
        settings["lr_scheduler_type"] = "constant"
        yield (
            f"lr_scheduler_type {kind} needs the number of steps, and max_steps is not set: the learning rate stays "
            f"constant; set trainer.total_steps and algorithm.optimizer.lr_scheduler_type {kind} for the decay"
        )


def _adapter(settings: Data) -> Iterator[str]:
    """Convert the LoRA adapter of ``ModelConfig``; its defaults are written out."""
    given = {name: settings.pop(f"lora_{name}", None) for name in ("r", "alpha", "target_modules")}
    wanted, any_given = settings.pop("use_peft", None), any(value is not None for value in given.values())
    if wanted is False or not (wanted or any_given):
        if any_given:
            yield "use_peft false: no adapter is trained, and the keys lora_* are left out"
        return
    adapter: Data = {"lora_rank": given["r"] or 16, "lora_alpha": given["alpha"] or 32}
    if given["target_modules"]:
        modules = given["target_modules"]
        adapter["target_modules"] = modules[0] if isinstance(modules, list) and len(modules) == 1 else modules
    else:
        yield "model.lora_configs: all linear layers get an adapter; peft's default for some models is fewer layers"
    if wanted is None:
        yield "the keys of LoRA are read as an adapter; without use_peft, TRL's command trains all weights"
    put(settings, "model.lora_configs", [adapter], "the adapter")
