"""All configuration keys of Trinity-RFT that our schema does not have, and for each of them one treatment.

A key is renamed (``Moved``), accepted without effect (``Noted``) or refused (``Refused``).
"""

from collections.abc import Iterator, Mapping

from rft_platform.config.foreign.treatments import Moved, Noted, Refused, Treatment

Row = tuple[str, Treatment]

_SET_ELSEWHERE = "Trinity-RFT sets it itself"
_TEXT_ONLY = "models and tasks are text here; images and videos need another platform"
_DATA_JUICER = "Data-Juicer is no part of the platform"
_OWN_PROCESSES = "the platform starts and watches its processes itself, on one machine and on a Ray cluster"
_REMOTE_CODE = Refused("code of a model folder is never run: use a model of transformers", allowed=(False,))
_REPETITION = Refused("it changes the distribution that is sampled: leave it out", allowed=(1, 1.0))
_MEGATRON = "layers are sharded over GPUs by FSDP2 (trainer.nproc)"

_INPUT = "buffer.explorer_input"
_TASKSETS = (f"{_INPUT}.taskset", f"{_INPUT}.tasksets[]", f"{_INPUT}.eval_tasksets[]")
_STORE = "buffer.trainer_input.experience_buffer"

#: Keys of every format section.
_FORMAT: tuple[Row, ...] = (
    (
        "system_prompt_key",
        Refused("all tasks have one system prompt: set format.system_prompt, or use your own workflow"),
    ),
    ("image_key", Refused(_TEXT_ONLY)),
    ("video_key", Refused(_TEXT_ONLY)),
    ("reply_prefix", Refused("the model writes its whole answer: leave it out, or use your own workflow")),
    ("workflow_key", Refused("all tasks of a taskset have one workflow: set workflow", allowed=("",))),
    ("reward_fn_key", Refused("all tasks of a taskset have one judge: set judge", allowed=("",))),
    ("enable_concatenated_multi_turn", Noted("every assistant message of a conversation is trained", silent=(True,))),
    ("chat_template", Refused("set model.custom_chat_template")),
    ("enable_thinking", Noted("explorer.rollout_model.enable_thinking sets it for the model")),
)

#: Keys for columns of demonstrations or preference pairs. A taskset has no such columns.
_ONLY_OFFLINE = ("prompt_type", "messages_key", "tools_key", "chosen_key", "rejected_key")

_TASKSET: tuple[Row, ...] = (
    ("data_selector", Moved(".task_selector")),
    ("rollout_args.logprobs", Noted("the log-prob of every sampled token is stored", silent=(0,))),
    ("enable_progress_bar", Noted("progress is shown in the terminal and in the UI", silent=(False,))),
    *((key, Noted("tasks are files, which are read once")) for key in ("max_retry_times", "max_retry_interval")),
    *(
        (key, Noted(_SET_ELSEWHERE))
        for key in ("index", "is_eval", "batch_size", "total_epochs", "total_steps", "ray_namespace", "schema_type")
    ),
    *((f"format.{key}", treatment) for key, treatment in _FORMAT),
    *((f"format.{key}", Noted("a task has a prompt column: format.prompt_key")) for key in _ONLY_OFFLINE),
)

_EXPERIENCES: tuple[Row, ...] = (
    ("name", Noted("the experiences of a project have one store", silent=("experience_buffer",))),
    ("capacity", Noted("experiences are files, without a limit of their number")),
    ("max_read_timeout", Noted("a training starts when its rows have landed, without a time limit")),
    ("max_retry_times", Noted("experiences are files")),
    ("max_retry_interval", Noted("experiences are files")),
    ("enable_progress_bar", Noted("progress is shown in the terminal and in the UI", silent=(False,))),
    ("data_selector", Noted("an offline dataset is shuffled by seed")),
    *(
        (key, Noted(_SET_ELSEWHERE))
        for key in (
            "index",
            "batch_size",
            "tokenizer_path",
            "total_epochs",
            "total_steps",
            "ray_namespace",
            "schema_type",
            "wrap_in_ray",
            "is_eval",
            "repeat_times",
        )
    ),
    *((f"format.{key}", treatment) for key, treatment in _FORMAT),
    ("replay_buffer.priority_fn_args.sigma", Noted("priorities are not random: linear_decay takes its place")),
    (
        "replay_buffer.priority_fn_args.use_count_limit",
        Noted("linear_decay serves often used rows last; reuse_cooldown_time limits how often"),
    ),
)

#: Keys of every served model.
_SERVED: tuple[Row, ...] = (
    ("engine_type", Refused("the engines are vllm and transformers: set engine.kind", allowed=("vllm", "vllm_async"))),
    ("data_parallel_size", Refused("replicas are explorer.rollout_model.engine_num", allowed=(1,))),
    ("pipeline_parallel_size", Refused("set tensor_parallel_size", allowed=(1,))),
    ("enable_expert_parallel", Refused("set engine.vllm_args: {enable_expert_parallel: true}", allowed=(False,))),
    *(
        (key, Noted("workflows can always call the policy by OpenAI clients", silent=(True,)))
        for key in ("enable_openai_api", "enable_openai_client")
    ),
    ("enable_history", Noted("every call to the policy is recorded", silent=(True,))),
    ("enable_auto_tool_choice", Noted("tool calls are parsed whenever a request offers tools", silent=(True,))),
    ("use_v1", Noted("vLLM has one engine core", silent=(True,))),
    ("enable_chunked_prefill", Noted("vLLM decides it; engine.vllm_args overrides it", silent=(True,))),
    ("logprobs", Noted("the log-prob of every sampled token is stored", silent=(0,))),
    ("min_response_tokens", Noted("a response ends when the model ends it", silent=(0,))),
    ("enable_prompt_truncation", Noted("a prompt is never shortened", silent=(False,))),
    ("repetition_penalty", _REPETITION),
    ("ignore_eos", Refused("a response ends when the model ends it: leave it out", allowed=(False,))),
    ("enable_multimodal", Refused(_TEXT_ONLY, allowed=(False,))),
    ("trust_remote_code", _REMOTE_CODE),
    ("enable_log_requests", Noted("the logs of the engine are below RFT_HOME", silent=(False,))),
    ("base_port", Noted("the system chooses free ports")),
    (
        "external_model_config",
        Refused("set explorer.auxiliary_models[].base_url and model", allowed=({"enable": False},)),
    ),
    ("weight_sync_buffer_size", Noted("weights are files")),
    ("rope_scaling", Refused("write it into config.json of the model folder")),
    ("rope_theta", Refused("write it into config.json of the model folder")),
    *(
        (key, Noted(_SET_ELSEWHERE))
        for key in (
            "gpu_per_engine",
            "nnodes",
            "node_rank",
            "enable_return_routed_experts",
            "bundle_indices",
            "engine_id",
            "ray_namespace",
            "ray_actor_name",
            "sync_method",
            "checkpoint_job_dir",
            "cuda_visible_devices",
            "enable_lora",
            "enable_runtime_lora_updating",
            "lora_modules",
            "lora_kwargs",
        )
    ),
)

_ROLLOUT_MODEL: tuple[Row, ...] = (
    *_SERVED,
    ("extra_engine_args", Moved("engine.vllm_args", {})),
    ("api_key", Noted("the platform makes a token for each engine", silent=("EMPTY",))),
    ("name", Noted("the policy is called by the name that the workflow gets")),
    ("model_path", Noted("model.model_path is served")),
    ("temperature", Moved("model.temperature")),
    ("top_p", Moved("model.top_p")),
    ("top_k", Moved("model.top_k")),
    ("max_model_len", Moved("model.max_model_len")),
    ("max_prompt_tokens", Moved("model.max_prompt_tokens")),
    ("max_response_tokens", Moved("model.max_response_tokens")),
    ("chat_template", Moved("model.custom_chat_template")),
)

_AUXILIARY: tuple[Row, ...] = (
    *_SERVED,
    (
        "extra_engine_args",
        Refused(
            "engine.vllm_args are those of every engine, the policy's too: set them there, or leave this key out",
            allowed=({},),
        ),
    ),
    (
        "api_key",
        Refused("name an environment variable with the key in api_key_env", allowed=("EMPTY", ""), secret=True),
    ),
    ("top_k", Noted("a request sets its own top_k")),
    ("max_prompt_tokens", Noted("max_model_len limits prompt and response together")),
    ("chat_template", Refused("write it into the model folder as chat_template.jinja")),
)

_MODEL: tuple[Row, ...] = (
    ("trust_remote_code", _REMOTE_CODE),
    ("chat_template_path", Moved("model.custom_chat_template")),
    ("logprobs", Noted("the log-prob of every sampled token is stored", silent=(0,))),
    ("min_response_tokens", Noted("a response ends when the model ends it", silent=(0,))),
    ("enable_prompt_truncation", Noted("a prompt is never shortened", silent=(False,))),
    ("repetition_penalty", _REPETITION),
    ("enable_thinking", Moved("explorer.rollout_model.enable_thinking")),
    ("fully_sharded_loras", Noted("engine.vllm_args takes its place", silent=(False,))),
    ("max_cpu_loras", Noted("engine.vllm_args takes its place")),
    ("rope_scaling", Refused("write it into config.json of the model folder")),
    ("rope_theta", Refused("write it into config.json of the model folder")),
    ("lora_configs[].name", Noted("a run trains one adapter, which needs no name", silent=("lora",))),
    (
        "lora_configs[].path",
        Refused(
            "a run starts with a new adapter: merge this one into its model (peft's merge_and_unload, or rft models "
            "export for a version of a project), and give the merged folder as model.model_path",
            allowed=("",),
        ),
    ),
    ("lora_configs[].base_model_name", Noted("the base model is model.model_path")),
    ("lora_configs[].lora_dtype", Noted("an adapter has the data type of trainer.dtype", silent=("auto",))),
    ("lora_configs[].exclude_modules", Refused("name the modules in target_modules")),
    ("lora_configs[].is_dummy", Noted(_SET_ELSEWHERE)),
    (
        "external_model",
        Refused(
            "rounds and mode bench measure policies of this project, whose weights are here; a model that is served "
            "elsewhere can be an entry of explorer.auxiliary_models",
            allowed=({"enable": False},),
        ),
    ),
)

_ALGORITHM: tuple[Row, ...] = (
    ("optimizer.min_lr_ratio", Noted("a decay ends at 0", silent=(0, 0.0))),
    ("optimizer.warmup_style", Moved("algorithm.optimizer.lr_scheduler_type")),
    ("optimizer.optimizer_type", Refused("the optimizer is AdamW: leave it out", allowed=("adam", "adamw"))),
    (
        "sample_strategy",
        Noted("synchronizer and replay_buffer decide which rows a step takes", silent=("default", "mix")),
    ),
    ("enable_router_replay", Refused("mixtures of experts are sampled without it: leave it out", allowed=(False,))),
    ("bypass_old_logprobs", Moved("algorithm.rollout_correction.mode", {True: "bypass", False: "decoupled"})),
    ("kl_loss_fn", Moved(".kl_loss_fn", {"low_var_kl": "k3"})),
    ("kl_penalty_fn", Moved(".kl_penalty_fn", {"low_var_kl": "k3"})),
    ("entropy_loss_fn", Moved(".entropy_loss_fn", {"mix": None})),
    ("loss_agg_mode", Moved(".loss_agg_mode", {})),
    (
        "advantage_fn",
        Moved(".advantage_fn", {"ppo": "gae", "reinforceplusplus": "reinforce_plus_plus", "grpo_verl": "grpo"}),
    ),
)

_EXPLORER: tuple[Row, ...] = (
    ("name", Noted("processes have their own names")),
    ("mode", Noted(_SET_ELSEWHERE)),
    ("runner_num", Noted("explorer.runner_per_model is the number of concurrent runs of each replica, not of all")),
    ("runner_prepare_concurrency", Noted(_OWN_PROCESSES)),
    ("runner_prepare_max_retries", Noted(_OWN_PROCESSES)),
    ("env_vars", Noted("workflows have the environment of the command: set the variables there")),
    ("concurrent_mode", Noted("runs are always concurrent, and no two of them share an object")),
    ("max_repeat_times_per_runner", Noted("runs of a task are independent of each other")),
    ("bench_on_latest_checkpoint", Noted("mode bench evaluates every policy without a result", silent=(False,))),
    ("min_running_model_num", Noted("the service answers as long as one replica does")),
    ("db_url", Moved("buffer.trainer_input.experience_buffer.path")),
    ("runner_state_report_interval", Noted("the terminal and the UI show the runs", silent=(0,))),
    ("max_inflight_batches", Noted("synchronizer.sync_offset takes its place")),
    ("over_rollout.return_partial_tasks", Moved("explorer.group_policy", {True: "partial", False: None})),
    ("dynamic_timeout.warmup_min_steps", Noted("the time-out applies after 8 attempts that succeeded")),
)

_TRAINER: tuple[Row, ...] = (
    ("name", Noted("processes have their own names")),
    ("trainer_type", Noted("the platform's trainer is used", silent=("verl",))),
    ("trainer_strategy", Noted(_MEGATRON, silent=("fsdp", "fsdp2"))),
    ("megatron", Noted(_MEGATRON)),
    ("enable_preview", Noted("rft rounds and the UI show samples", silent=(True,))),
    ("use_dynamic_bsz", Noted("rows are always packed up to trainer.max_token_len_per_gpu", silent=(True,))),
    ("use_remove_padding", Noted("packs have no padding", silent=(True,))),
    ("balance_batch", Noted("packs are balanced over ranks", silent=(True,))),
    ("fix_actor_microbatch_loss_scale", Noted("a loss does not depend on how rows are packed")),
    ("grad_clip", Moved("algorithm.optimizer.clip_grad")),
    ("critic_warmup", Moved("algorithm.critic.warmup_steps", {0: None})),
    (
        "ulysses_sequence_parallel_size",
        Noted("sequences are not split over GPUs: a pack holds trainer.max_token_len_per_gpu tokens", silent=(1,)),
    ),
    *(
        (key, Moved("trainer.cpu_offload", {False: None}))
        for key in ("param_offload", "optimizer_offload", "grad_offload", "offload_policy")
    ),
    (
        "save_strategy",
        Noted("save_interval, max_checkpoints_to_keep and keep_every take its place", silent=("unrestricted",)),
    ),
    ("max_checkpoints_to_keep", Moved(".max_checkpoints_to_keep", {0: None})),
    ("save_interval", Moved(".save_interval", {0: None})),
    ("trust_remote_code", _REMOTE_CODE),
    ("trainer_config_path", Noted("it configures another framework's trainer", silent=("",))),
)

_OTHERS: tuple[Row, ...] = (
    ("checkpoint_job_dir", Noted(_SET_ELSEWHERE)),
    ("ray_namespace", Moved("cluster.namespace")),
    ("ignore_validator_suggestions", Noted("rft run --dry-run says what does not fit the machine")),
    ("log", Noted("RFT_LOG_LEVEL sets the level, and logs are below RFT_HOME", silent=({"level": "INFO"},))),
    ("cod", Refused("tasks are not packed into one another: leave it out")),
    ("service.data_juicer", Noted(_DATA_JUICER)),
    (
        "data_processor.task_pipeline",
        Noted(f"{_DATA_JUICER}: prepare the taskset's file before, or order tasks by task_selector"),
    ),
    *(
        (f"data_processor.experience_pipeline.{key}", Noted("every row is stored before and after the operators"))
        for key in ("save_input", "input_save_path", "inputs", "output")
    ),
    ("cluster.ray_address", Moved("cluster.address")),
    *(
        (f"cluster.{key}", Noted(_SET_ELSEWHERE))
        for key in (
            "total_gpu_num",
            "rollout_gpu_num",
            "auxiliary_model_gpu_num",
            "explorer_gpu_num",
            "trainer_gpu_num",
            "trainer_node_num",
            "trainer_gpu_num_per_node",
        )
    ),
    *((f"buffer.{key}", Noted(_SET_ELSEWHERE)) for key in ("explorer_output", "tokenizer_path", "cache_dir")),
    ("buffer.eval_tasksets", Moved(f"{_INPUT}.eval_tasksets")),
    ("buffer.train_batch_size", Moved(".train_batch_size", {0: None})),
    ("monitor.monitor_args", Noted("the services read their settings from the environment")),
    ("monitor.detailed_stats", Noted("mean, deviation and best of n are always stored", silent=(False,))),
    ("monitor.enable_ray_timeline", Noted(_OWN_PROCESSES, silent=(False,))),
    ("monitor.cache_dir", Noted(_SET_ELSEWHERE)),
    ("synchronizer.explorer_sync_interval", Moved("synchronizer.sync_interval")),
    ("synchronizer.trainer_sync_interval", Moved("synchronizer.sync_interval")),
    ("synchronizer.group_name", Noted("weights are files")),
    ("synchronizer.wait_for_checkpoint", Noted("a policy is used when its checkpoint is complete")),
    ("synchronizer.explorer_world_size", Noted(_SET_ELSEWHERE)),
    ("synchronizer.ray_namespace", Noted(_OWN_PROCESSES)),
)


def _below(section: str, rows: tuple[Row, ...]) -> Iterator[Row]:
    yield from ((f"{section}.{key}", treatment) for key, treatment in rows)


KEYS: tuple[Row, ...] = (
    *_OTHERS,
    *_below("model", _MODEL),
    *_below("algorithm", _ALGORITHM),
    *(row for taskset in _TASKSETS for row in _below(taskset, _TASKSET)),
    *_below(_STORE, _EXPERIENCES),
    *_below("explorer", _EXPLORER),
    *_below("explorer.rollout_model", _ROLLOUT_MODEL),
    *_below("explorer.auxiliary_models[]", _AUXILIARY),
    *_below("trainer", _TRAINER),
)

_TASKSET_NAMES = {
    "default_workflow_type": "is read as workflow",
    "workflow_type": "is read as workflow",
    "default_reward_fn_type": "is read as judge",
    "reward_fn_type": "is read as judge",
    "repeat_times": "has no effect: algorithm.repeat_times is the number of runs per task",
}
#: Keys that are converted together with others and so are not in ``KEYS``, and what becomes of them.
CONVERTED: Mapping[str, str] = {
    "stages": "is read as warm_start, if the first stage is of sft, and as the sections of the project",
    "model.tinker": "is read as model.lora_configs: an adapter is trained on this machine",
    "trainer.trainer_config": (
        "has no effect, but for settings of its critic, which are read as algorithm.critic, and of the optimizer of "
        "actor_rollout_ref.actor, which are read as algorithm.optimizer"
    ),
    "algorithm.optimizer.lr_warmup_steps_ratio": "is read as algorithm.optimizer.lr_warmup_steps",
    "algorithm.sample_strategy_args": "has no effect, but for expert_data_ratio, which is read as algorithm.experts",
    "buffer.trainer_input.auxiliary_buffers": "is read as algorithm.experts",
    f"{_INPUT}.default_workflow_type": "is read as workflow of the tasksets that set none",
    f"{_INPUT}.default_eval_workflow_type": "is read as workflow of the eval_tasksets that set none",
    f"{_INPUT}.default_reward_fn_type": "is read as judge of the tasksets that set none",
    **{f"{taskset}.{key}": text for taskset in _TASKSETS for key, text in _TASKSET_NAMES.items()},
    f"{_INPUT}.eval_tasksets[].repeat_times": f"is read as {_INPUT}.eval_tasksets[].rollout_args.n",
}
