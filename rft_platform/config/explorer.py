"""Sections ``explorer`` and ``engine``: the models that answer, and how the workflow is run against them."""

from typing import Any, Literal

from pydantic import AliasChoices, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rft_platform.config.section import Section


class RolloutModel(Section):
    """How a model is served."""

    engine_num: PositiveInt = 1
    """Replicas: processes of their own that share the work; one that ends is left out and started again."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs a replica."""
    enable_openai_api: bool = Field(
        default=False, validation_alias=AliasChoices("enable_openai_api", "enable_openai_client")
    )
    """Hand the workflow an OpenAI client."""
    enable_history: bool = False
    """Record every call, so that the workflow need not."""
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_thinking: bool | None = None
    """Chat-template switch; null: the template's own default."""
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    enforce_eager: bool = False
    dtype: str = "bfloat16"
    """Weights on a GPU; ``engine.dtype`` overrides it."""
    seed: int = 42


class AuxiliaryModel(RolloutModel):
    """A further model at the disposal of workflows and judges: served, never trained."""

    name: str | None = None
    model_path: str
    max_model_len: PositiveInt | None = None


class OverRollout(Section):
    """Start more runs than needed and leave out the slowest."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of a batch's tasks that need not finish."""
    wait_after_min: NonNegativeFloat = 30.0
    """Seconds the stragglers get once enough runs have ended."""


class DynamicTimeout(Section):
    """A time-out that follows the batch: ``ratio`` times the mean duration of the runs that have ended."""

    enable: bool = False
    ratio: float = Field(default=3.0, gt=1)


class Explorer(Section):
    """Rollouts and the explorer service."""

    rollout_model: RolloutModel = RolloutModel()
    auxiliary_models: list[AuxiliaryModel] = Field(default_factory=list)
    runner_per_model: PositiveInt = 8
    """Runs at the same time for each engine replica."""
    max_timeout: PositiveFloat = 1800.0
    """Seconds a run may take."""
    max_retry_times: NonNegativeInt = 2
    """Repetitions of a failed run."""
    service_status_check_interval: PositiveFloat = 60.0
    """Seconds between looks of the service for a new checkpoint."""
    proxy_port: int = Field(default=8010, ge=1, le=65535)
    listen_address: str = "127.0.0.1"
    eval_interval: PositiveInt = 100
    """Explore batches between evaluations: used where it is written and ``evaluation.every`` is not."""
    eval_on_startup: bool = True
    """Evaluate the starting policy too."""
    over_rollout: OverRollout = OverRollout()
    dynamic_timeout: DynamicTimeout = DynamicTimeout()


class Engine(Section):
    """The process that serves the policy."""

    kind: Literal["auto", "transformers", "vllm"] = "auto"
    """``auto``: vLLM where CUDA and vLLM are there, else the embedded transformers engine."""
    dtype: str = "auto"
    """``auto``: ``explorer.rollout_model.dtype`` on a GPU, float32 on a CPU."""
    threads: PositiveInt = 1
    """CPU threads."""
    idle_timeout_s: PositiveFloat = 900.0
    """Seconds without a request after which the process ends."""
    device: str = "auto"
    """``auto``: cuda where there is one, else cpu."""
    python: str | None = None
    """Interpreter of the environment that has vLLM; null: this one. ``RFT_VLLM_PYTHON`` overrides it."""
    max_lora_rank: NonNegativeInt | None = None
    """vLLM: room for an adapter of this rank, 0 for none; null: as ``model.lora_configs`` asks."""
    kv_cache_gb: PositiveFloat = 1.0
    """vLLM on a CPU: memory for keys and values."""
    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """Further options of vLLM's server, as ``{max_num_seqs: 64}``."""
