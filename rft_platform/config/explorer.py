"""Sections ``explorer`` and ``engine``: the models that answer, and how the workflow is run against them."""

import re
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
    """A further model at the disposal of workflows and judges, never trained and never recorded.

    With ``model_path`` the platform serves it in an engine of its own, as section ``engine`` and the keys of
    ``rollout_model`` say; with ``base_url`` it is asked where it is served already.
    """

    name: str | None = None
    """By which workflows and judges know it; default: the last part of ``model_path`` or of ``model``."""
    model_path: str = ""
    """A folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry."""
    base_url: str | None = None
    """Root of an OpenAI-compatible API, usually ending in /v1."""
    model: str | None = None
    """What requests to ``base_url`` name as their model."""
    api_key_env: str | None = None
    """The environment variable that holds the key of ``base_url``; null: it asks for none."""
    max_concurrency: PositiveInt | None = None
    """Requests at once from one process; default: ``runner_per_model`` for each replica."""
    timeout_s: PositiveFloat = 300.0
    """Of one attempt at a request."""
    max_model_len: PositiveInt | None = None
    temperature: NonNegativeFloat | None = None
    """Where a request names none; null: the server's own. ``top_p`` and ``max_response_tokens`` likewise."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_response_tokens: PositiveInt | None = None

    @property
    def known_as(self) -> str:
        """The name, as given or as it follows from the model."""
        return self.name or (self.model or self.model_path).rstrip("/").rpartition("/")[2]

    def identity(self, served: str = "") -> str:
        """What its answers depend on: the model, where it is asked, and the fields that each request gets.

        ``served``: the folder that an engine of ours serves, where it is known; else ``model_path`` stands for it.
        """
        model = f"{self.model} at {self.base_url}" if self.base_url else served or self.model_path
        keys = ("temperature", "top_p", "max_response_tokens", "enable_thinking")
        given = [f"{key}={getattr(self, key)}" for key in keys if getattr(self, key) is not None]
        return ", ".join([model, *given])

    @property
    def lease(self) -> str:
        """Stem of the lease and log files of its first engine."""
        return "auxiliary-" + re.sub(r"[^A-Za-z0-9_-]+", "-", self.known_as)

    @property
    def devices(self) -> int:
        """GPUs that serving it takes: none where it is served already."""
        return 0 if self.base_url else self.tensor_parallel_size * self.engine_num


class OverRollout(Section):
    """Explore more tasks than needed and leave out the slowest. An evaluation waits for every run."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of a batch's tasks that need not finish; 0: every run is waited for."""
    wait_after_min: NonNegativeFloat = 30.0
    """Seconds that the other runs get once all runs of enough tasks have succeeded; then they are stopped."""


class DynamicTimeout(Section):
    """A time-out that follows the batch: ``ratio`` times the mean duration of the attempts that have succeeded.

    It begins when 8 have, is never below 1 second and never above ``max_timeout``.
    """

    enable: bool = False
    ratio: float = Field(default=3.0, gt=1)


class Workers(Section):
    """Where workflows run that call the model themselves."""

    kind: Literal["inprocess", "process"] = "inprocess"
    """``process``: each run in a worker process, which is killed at the time-out with everything that it started."""
    python: str | None = None
    """Interpreter (3.11 or later) of the environment that the agent needs: it must have ``openai``; null: this one."""
    count: PositiveInt | None = None
    """Processes at most; null: as many as runs at the same time."""


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
    workers: Workers = Workers()
    group_policy: Literal["complete", "drop", "partial"] = "complete"
    """What becomes of a task with a run that failed or was stopped. ``complete``: failed runs are tried once more, all
    attempts anew, and the task is left out if one still fails; ``drop``: it is left out; ``partial``: the runs that
    succeeded are kept."""
    truncated_reward: float | None = Field(default=0.0, allow_inf_nan=False)
    """Reward of a run that outgrew the context before its workflow could give one (a judge, where there is one, gives
    its own); null: such a run has failed."""


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
    heartbeat_timeout_s: float = Field(default=120.0, ge=20.0)
    """Seconds without an answer to ``/health`` (asked every 10 s) during a request after which the process is ended and
    the phase repeated."""
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
