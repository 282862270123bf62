"""Sections ``explorer`` and ``engine``: how models are served, and how workflows run against them."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rft_platform.config.schema.section import Options, Section

#: The reasoning parser that the tokenizer decides on, when an engine is declared.
AUTO_PARSER = "auto"


class RolloutModel(Section):
    """How a model is served."""

    engine_num: PositiveInt = 1
    """Replicas: separate processes that share the work. A replica that fails is left out and restarted."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs per replica."""
    tool_call_parser: str | None = None
    """Format in which the model writes tool calls (transformers engine: ``hermes``; vLLM: its parsers)."""
    reasoning_parser: str | None = None
    """Format in which the model marks its thoughts (transformers engine: ``qwen3``, ``deepseek_r1``; vLLM: its own).
    ``auto``: ``deepseek_r1`` if the file ``tokenizer.json`` of the model contains ``</think>``, otherwise none."""
    enable_thinking: bool | None = None
    """The chat template's switch for thinking. null: the template's own default."""
    enable_prefix_caching: bool = True
    """vLLM: reuse the KV cache of prompts with a common beginning."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """vLLM: share of the GPU's memory that the engine may use. Default: 0.9; on a GPU that the trainer uses too, what
    the trainer leaves, at most 0.6."""
    enable_sleep_mode: bool | None = None
    """vLLM, on a GPU that the trainer uses too: free the engine's memory while the trainer works. Default: if otherwise
    neither all answers of a batch nor the fastest training settings fit."""
    enforce_eager: bool = False
    """vLLM: do not capture CUDA graphs; starts faster, samples more slowly."""
    dtype: str = "bfloat16"
    """Data type of the weights on a GPU; ``engine.dtype`` overrides it."""
    seed: int = 42
    """Seed of requests that set none."""


class AuxiliaryModel(RolloutModel):
    """An additional model for workflows and judges. It is never trained, and calls to it are never recorded.

    With ``model_path`` the platform serves it with a separate engine, configured by section ``engine`` and the keys of
    ``rollout_model``. With ``base_url`` it is a model that is already served elsewhere.
    """

    name: str | None = None
    """Name by which workflows and judges refer to the model. Default: the last part of ``model_path`` or of
    ``model``."""
    model_path: str = ""
    """A folder, a Hugging Face name, or ``models:/NAME@alias`` of the registry."""
    base_url: str | None = None
    """Root of an OpenAI-compatible API, usually ending in /v1."""
    model: str | None = None
    """Model name in requests to ``base_url``."""
    api_key_env: str | None = None
    """Environment variable with the API key of ``base_url``. null: no key is needed."""
    max_concurrency: PositiveInt | None = None
    """Maximum number of concurrent requests of one process. Default: ``runner_per_model`` for each replica."""
    timeout_s: PositiveFloat = 300.0
    """Time-out of one attempt at a request, in seconds."""
    max_model_len: PositiveInt | None = None
    """Prompt and response together, in tokens. Default: the model's own limit."""
    temperature: NonNegativeFloat | None = None
    """Used if a request sets none; null: the server's default. The same holds for ``top_p`` and
    ``max_response_tokens``."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Used if a request sets none."""
    max_response_tokens: PositiveInt | None = None
    """Used if a request sets none."""

    @property
    def known_as(self) -> str:
        """The name as configured, or else derived from the model."""
        return self.name or (self.model or self.model_path).rstrip("/").rpartition("/")[2]

    def identity(self, served: str = "") -> str:
        """Everything that the model's answers depend on: model, address, and the fields that are set in each request.

        ``served``: the folder that the platform's engine serves, if it is known; otherwise ``model_path`` is used.
        """
        model = f"{self.model} at {self.base_url}" if self.base_url else served or self.model_path
        keys = ("temperature", "top_p", "max_response_tokens", "enable_thinking")
        given = [f"{key}={getattr(self, key)}" for key in keys if getattr(self, key) is not None]
        return ", ".join([model, *given])

    @property
    def lease(self) -> str:
        """Stem of the lease and log file names of the model's first engine."""
        return "auxiliary-" + re.sub(r"[^A-Za-z0-9_-]+", "-", self.known_as)

    @property
    def devices(self) -> int:
        """Number of GPUs needed to serve the model; 0 if it is served elsewhere."""
        return 0 if self.base_url else self.tensor_parallel_size * self.engine_num


class OverRollout(Section):
    """Explore more tasks than needed and drop the slowest. An evaluation always waits for every run."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of a batch's tasks that may be left unfinished. 0: wait for every run."""
    wait_after_min: NonNegativeFloat = 30.0
    """Seconds that the remaining runs get after all runs of enough tasks have succeeded; then they are stopped."""


class DynamicTimeout(Section):
    """A time-out derived from the batch: ``ratio`` times the mean duration of the attempts that succeeded.

    It applies after 8 attempts have succeeded. It is never below 1 second or above ``max_timeout``.
    """

    enable: bool = False
    """Switches the derived time-out on."""
    ratio: float = Field(default=3.0, gt=1)
    """Factor on the mean duration."""


class RuntimeEnvConfig(Section):
    """How Ray builds a runtime environment."""

    setup_timeout_seconds: PositiveInt = 600
    """Time-out of the installation on one node."""


class RuntimeEnv(Section):
    """A runtime environment of Ray, with Ray's names. Each node builds it when it starts its first worker."""

    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables. Secrets do not belong here: workers get the variables of the command that starts them."""
    working_dir: str | None = None
    """Folder in which the workers run, and from which they import first. A path that all nodes see, or the URI of an
    archive."""
    py_modules: list[str] = Field(default_factory=list)
    """Packages and modules that workers import before others: paths that all nodes see, wheels or URIs."""
    pip: str | list[str] | dict[str, Any] | None = None
    """Packages that pip installs for the workers: a list, the path of a requirements file, or ``{packages,
    pip_version, pip_check, pip_install_options}``."""
    uv: str | list[str] | dict[str, Any] | None = None
    """The same with uv; the options are ``{packages, uv_version, uv_check, uv_pip_install_options}``."""
    config: RuntimeEnvConfig = RuntimeEnvConfig()
    """How Ray builds the environment."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Ray has more fields, so an unknown one is no misspelling: name those that there are."""
        unknown = [name for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        if unknown:
            raise ValueError(
                f"explorer.workers.runtime_env: got the fields {', '.join(map(str, unknown))}; expected "
                f"{', '.join(cls.model_fields)}"
            )
        return given

    @property
    def fields(self) -> dict[str, Any]:
        """The keys that are set, as Ray takes them; empty if there are none."""
        given = self.model_dump(mode="json", exclude_defaults=True)
        return given and {**given, "config": self.config.model_dump()}

    @property
    def folders(self) -> list[str]:
        """The local folders from which workers import first."""
        modules = [str(Path(entry).parent) for entry in self.py_modules if "://" not in entry]
        here = self.working_dir is not None and "://" not in self.working_dir
        return [*modules, str(self.working_dir)] if here else modules


class Workers(Section):
    """Processes in which workflows run, if the workflow calls the model itself (every workflow but single_turn)."""

    kind: Literal["inprocess", "process"] = "inprocess"
    """``process``: each run uses a worker process, which is killed at the time-out together with everything it
    started."""
    python: str | None = None
    """Python interpreter (3.11 or later) of the agent's environment, which must have ``openai``. null: this
    interpreter."""
    count: PositiveInt | None = None
    """Maximum number of processes; with several tasksets, of each of them. null: one for each concurrent run."""
    cpus: PositiveInt = 1
    """Processors of a node that each process reserves, with ``cluster.kind`` ray."""
    resources: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Named resources of a node that each process reserves, with ``cluster.kind`` ray: ``{browser: 1}``."""
    runtime_env: RuntimeEnv = RuntimeEnv()
    """Ray's runtime environment of each process, with ``cluster.kind`` ray: variables, code and packages."""
    judges: bool = True
    """With ``kind`` process and ``cluster.kind`` ray, run judges that are your functions in such processes, too. They
    use the nodes' interpreter. false: in the process of the run, for judges that keep state between runs."""

    @property
    def own_imports(self) -> bool:
        """Whether the processes import code or packages that this process may not have."""
        env = self.runtime_env
        return bool(self.python or env.working_dir or env.py_modules or env.pip or env.uv)


class Explorer(Section):
    """Rollouts and the explorer service."""

    rollout_model: RolloutModel = RolloutModel()
    engines_per_gpu: PositiveInt = 1
    """Replicas of the policy's engine that share a GPU, for example so that one serves while another restarts.
    ``rollout_model.gpu_memory_utilization`` is the share of each replica."""
    auxiliary_models: list[AuxiliaryModel] = Field(default_factory=list)
    runner_per_model: PositiveInt = 8
    """Concurrent runs for each engine replica."""
    max_timeout: PositiveFloat = 1800.0
    """Time-out of one attempt of a run, in seconds."""
    max_retry_times: NonNegativeInt = 2
    """Retries of a failed run."""
    service_status_check_interval: PositiveFloat = 10.0
    """Seconds between two looks for new versions that another host trains (``mode: serve`` with
    ``checkpoint_root_dir``). New versions of the same ``RFT_HOME`` are looked for twice a second."""
    proxy_port: int = Field(default=8010, ge=1, le=65535)
    """Port of the explorer service (``rft serve``)."""
    listen_address: str = "127.0.0.1"
    """Address of the explorer service (``rft serve``)."""
    eval_interval: PositiveInt = 100
    """Explore batches between evaluations: ``evaluation.every`` in another unit, which is used if this is not set. Both
    with different values are refused."""
    eval_on_startup: bool = True
    """Also evaluate the starting policy."""
    batches_in_flight: PositiveInt = 1
    """Explore batches whose tasks may be sampled at the same time, for the workflow ``single_turn``. With 2, a batch
    starts with the unfinished tasks of the batch before, begins further ones as answers end, and ends once
    ``buffer.batch_size`` tasks have all their answers; the next batch continues the others on its own weights."""
    over_rollout: OverRollout = OverRollout()
    dynamic_timeout: DynamicTimeout = DynamicTimeout()
    workers: Workers = Workers()
    group_policy: Literal["complete", "drop", "partial"] = "complete"
    """How to handle a task with a run that failed or was stopped. ``complete``: retry the failed runs once more with
    all their attempts, and drop the task if one still fails. ``drop``: drop the task. ``partial``: keep the runs that
    succeeded."""
    truncated_reward: float | None = Field(default=0.0, allow_inf_nan=False)
    """Reward of a run that exceeded the context before its workflow returned; no judge is called. Step rewards, if
    there are any, are summed instead. null: such a run counts as failed."""

    @property
    def policy_gpus(self) -> int:
        """GPUs of the policy's engine: all its replicas."""
        return self.rollout_model.tensor_parallel_size * -(-self.rollout_model.engine_num // self.engines_per_gpu)


class Engine(Section):
    """The process that serves the policy."""

    kind: Literal["auto", "transformers", "vllm"] = "auto"
    """``auto``: vLLM if CUDA and vLLM are available, else the embedded transformers engine."""
    dtype: str = "auto"
    """``auto``: ``explorer.rollout_model.dtype`` on a GPU, float32 on a CPU."""
    threads: PositiveInt = 1
    """CPU threads."""
    idle_timeout_s: PositiveFloat = 900.0
    """The process ends after this number of seconds without a request."""
    heartbeat_timeout_s: float = Field(default=120.0, ge=20.0)
    """During a request ``/health`` is polled every 10 s. If there is no answer for this number of seconds, the process
    is ended and the launch is retried."""
    device: str = "auto"
    """``auto``: cuda if available, else cpu."""
    python: str | None = None
    """Python interpreter of the environment with vLLM. null: this interpreter. ``RFT_VLLM_PYTHON`` overrides it."""
    max_lora_rank: NonNegativeInt | None = None
    """vLLM: maximum rank of an adapter, 0 for no adapter. null: derived from ``model.lora_configs``."""
    urls: list[str] = Field(default_factory=list)
    """Engines that somebody else runs with ``rft engine``, one for each replica: ``[http://HOST:PORT, ...]``. They see
    model and checkpoints under the same paths. Nothing is started or ended, and the other keys of this section and of
    ``explorer.rollout_model`` that describe an engine have no effect."""
    token_env: str | None = None
    """Name of the environment variable with the token of the engines in ``urls``."""
    kv_cache_gb: PositiveFloat = 1.0
    """vLLM on a CPU: memory of the KV cache, in GB."""
    vllm_args: Options = Field(default_factory=dict)
    """Additional options of the vLLM server, for example ``{max_num_seqs: 64}``."""
