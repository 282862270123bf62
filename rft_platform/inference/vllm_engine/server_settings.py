"""Settings that the launcher passes to the server, and the vLLM command line made from them."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import read_json
from rft_platform.config.engine_choice import Vllm
from rft_platform.inference.serving.weight_files import layout_of
from rft_platform.inference.vllm_engine.adapters import target_modules
from rft_platform.inference.vllm_engine.versions import command_line, dtype_of, resource_options

VARIABLE = "RFT_VLLM_SETTINGS"  # passes the settings to the middleware, which vLLM creates without arguments
MIDDLEWARE = "rft_platform.inference.vllm_engine.middleware.EnginePlanes"
WORKER_EXTENSION = "rft_platform.inference.vllm_engine.worker.WorkerExtension"
SCHEDULER = "rft_platform.inference.vllm_engine.scheduler.scheduler"
TOP_LOGPROBS = 20
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks that vLLM can be started for
#: Options that the engine depends on; the user's ``arguments`` must not set them.
RESERVED = {
    "model",
    "served_model_name",
    "host",
    "port",
    "uds",
    "middleware",
    "worker_extension_cls",
    "scheduler_cls",
    "logprobs_mode",
    "generation_config",
    "max_model_len",
    "dtype",
    "data_parallel_size",
    "api_server_count",
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Settings that only the vLLM engine has."""

    enable_prefix_caching: bool = True
    gpu_dtype: str = "bfloat16"  # what "auto" means on a GPU
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    kv_cache_gb: float = 1.0  # for a CPU; on a GPU, gpu_memory_utilization determines the size of the cache
    sleeps: bool = False  # whether the engine can free the GPU's memory for a trainer
    max_lora_rank: int = 0  # largest rank of adapters that may be loaded; 0: no adapters
    arguments: dict[str, Any] = field(default_factory=dict)  # further options of vLLM's server

    def check(self) -> None:
        """Raise UserError if ``arguments`` names an option of the platform, or ``max_lora_rank`` is too large."""
        taken = sorted({name.lstrip("-").replace("-", "_") for name in self.arguments} & RESERVED)
        if self.max_lora_rank > LORA_RANKS[-1]:
            raise UserError(f"max_lora_rank {self.max_lora_rank}: vLLM serves adapters up to rank {LORA_RANKS[-1]}")
        if taken:
            raise UserError(f"engine.vllm_args: {', '.join(taken)}: only the platform sets these options; remove them")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server process."""

    model_path: str
    dtype: str
    threads: int
    max_model_len: int | None
    seed: int | None
    tool_call_parser: str | None
    chat_template: str | None
    options: VllmOptions
    reasoning_parser: str | None = None
    enable_thinking: bool | None = None

    @classmethod
    def from_launcher(cls, text: str) -> "ServerSettings":
        """Read the server's command-line argument."""
        values = json.loads(text)
        engine = values.pop("engine")
        options = VllmOptions(**engine.pop("options"))
        return cls(**values, **engine, options=options)

    @classmethod
    def from_environment(cls) -> "ServerSettings":
        """Read the settings that ``to_environment`` stored."""
        values = json.loads(os.environ[VARIABLE])
        return cls(**{**values, "options": VllmOptions(**values["options"])})

    def to_environment(self) -> None:
        """Store the settings in an environment variable, for the program that will replace this process."""
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @property
    def template_options(self) -> dict[str, Any]:
        """Default variables of the chat template."""
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}

    def context(self) -> int:
        """Maximum tokens of prompt and completion together: ``max_model_len``, at most the model's own limit."""
        config = read_json(Path(self.model_path) / "config.json")
        own = (config.get("text_config") or config).get("max_position_embeddings")
        limits = [limit for limit in (self.max_model_len, own) if limit]
        if not limits:
            raise UserError(f"{self.model_path}: config.json has no max_position_embeddings: set model.max_model_len")
        return min(limits)

    def arguments(self, vllm: Vllm, host: str, port: int) -> list[str]:
        """Options of vLLM's server; ``server_program`` names the model. Port 0 is any free port; the lease names it."""
        options: dict[str, Any] = {
            "served_model_name": [self.model_path, Path(self.model_path).name],
            "host": host,
            "port": port,
            "generation_config": "vllm",  # the request's sampling parameters, not the model folder's
            "dtype": dtype_of(vllm, self.dtype, self.options.gpu_dtype),
            "max_model_len": self.context() + 1,  # so that a sequence as long as the context can be scored
            "seed": self.seed or 0,
            "logprobs_mode": "processed_logprobs",  # log-probs of the sampling distribution
            "max_logprobs": TOP_LOGPROBS,
            "middleware": MIDDLEWARE,
            "worker_extension_cls": WORKER_EXTENSION,
            "scheduler_cls": SCHEDULER,
            "enable_auto_tool_choice": True,
            "tool_call_parser": self.tool_call_parser or "hermes",
            "reasoning_parser": self.reasoning_parser,
            "chat_template": self.chat_template,
            "enable_prefix_caching": self.options.enable_prefix_caching,
            "disable_uvicorn_access_log": True,
            "uvicorn_log_level": "warning",
            **resource_options(vllm, asdict(self.options), self.context() + 1),
            **self._adapters(),
        }
        own = {name.lstrip("-").replace("-", "_"): value for name, value in self.options.arguments.items()}
        return command_line({**options, **own})

    def _adapters(self) -> dict[str, Any]:
        if not self.options.max_lora_rank:
            return {}
        rank = next(rank for rank in LORA_RANKS if rank >= self.options.max_lora_rank)
        targets = target_modules(layout_of(Path(self.model_path)))
        return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "lora_target_modules": targets}
