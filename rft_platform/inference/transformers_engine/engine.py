"""The transformers engine: model, tokenizer, chat template and scheduler behind one thread-safe class."""

import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from rft_platform.common.digests import digest_once, digest_weights
from rft_platform.common.errors import UserError
from rft_platform.inference.interface import EngineStatus, PartialBatch, SamplingParams
from rft_platform.inference.serving.weight_files import base_of, is_adapter, model_digest
from rft_platform.inference.transformers_engine.generator import Generator
from rft_platform.inference.transformers_engine.model import PolicyModel
from rft_platform.inference.transformers_engine.request import Request, TokenEvent
from rft_platform.inference.transformers_engine.scheduler import Scheduler, Served
from rft_platform.inference.transformers_engine.weights import (
    merge_adapter,
    read_tensors,
    replace_weights,
)
from rft_platform.openai_api.templates import ChatTemplate, load_template, template_process
from rft_platform.openai_api.tokenizer import PolicyTokenizer, check_ids, check_prompt

LOG = logging.getLogger(__name__)
CACHE_SHARE = 0.25  # share of the memory free at the start that keys and values may take
CAPABILITIES = [
    "chat",
    "completions",
    "tokens",
    "score",
    "score-frozen",
    "logprobs",
    "tools",
    "reasoning",
    "stream",
    "lora",
    "pause",
    "update_weights",
]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How to serve a model folder. ``None`` and "auto" are resolved on the machine that serves."""

    model_path: Path
    dtype: str = "auto"  # float32 on a CPU, bfloat16 on a GPU
    device: str = "auto"  # cuda where there is one
    threads: int = 1
    max_model_len: int | None = None  # the model's own limit
    seed: int | None = None  # for requests without a seed, whose results then depend on their order of arrival
    chat_template: str | None = None  # Jinja text or a file
    enable_thinking: bool | None = None  # default variable of the chat template
    reasoning_parser: str | None = None  # if set, reasoning between <think> and </think> is separated from the answer
    max_rows: int = 4096
    max_batch_tokens: int | None = None  # None: derived from the free memory


class TransformersEngine:
    """Serves one policy; every public method may be called from any thread."""

    def __init__(self, settings: EngineSettings) -> None:
        torch.set_num_threads(settings.threads)
        folder = settings.model_path
        self.device = torch.device(_resolve_device(settings.device))
        dtype = _resolve_dtype(settings.dtype, self.device)
        self.tokenizer = PolicyTokenizer(folder)
        thinking = {} if settings.enable_thinking is None else {"enable_thinking": settings.enable_thinking}
        self.template = ChatTemplate(self.tokenizer, load_template(settings.chat_template), thinking)
        self._model_digest = model_digest(folder)
        template_process().start()  # the process starts up while the model is loaded
        self.parses_reasoning = settings.reasoning_parser is not None
        self.model = PolicyModel(folder, dtype, self.device)
        if (settings.max_model_len or 0) > self.model.max_positions:
            LOG.warning(
                "max_model_len %d: this engine computes at most %d tokens of this model (max_position_embeddings, "
                "or the original length with rope_type longrope); use vLLM for longer ones",
                settings.max_model_len, self.model.max_positions,
            )  # fmt: skip
        self.max_model_len = min(settings.max_model_len or self.model.max_positions, self.model.max_positions)
        self.model_path = folder
        self.base = folder  # the full weights that adapters are merged into
        generator = Generator(self.model, self.tokenizer.end_ids, self.tokenizer.decode)
        budget = settings.max_batch_tokens or self._free_tokens()
        served = Served(0, digest_weights(folder, digest_once), folder)
        self.scheduler = Scheduler(generator, served, settings.max_rows, budget)
        self._seeds = None if settings.seed is None else itertools.count(settings.seed)
        self._counts = {"requests": 0.0, "prompt_tokens": 0.0, "completion_tokens": 0.0, "weight_updates": 0.0}
        self._process = psutil.Process()
        self.template.check()

    def submit(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        top_logprobs: int = 0,
        on_token: Callable[[TokenEvent], None] | None = None,
        partial: PartialBatch | None = None,
    ) -> Request:
        """Queue prompts for sampling; UserError if one is empty, too long or has unknown ids."""
        for prompt in prompts:
            check_prompt(prompt, self.max_model_len, self.model.vocabulary)
        if sampling.seed is None and self._seeds is not None:
            sampling = replace(sampling, seed=next(self._seeds))
        request = Request(prompts, sampling, self.max_model_len, top_logprobs, on_token, partial)
        request.future.add_done_callback(lambda _: self._count(request))
        self.scheduler.submit(request)
        return request

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it; the first token's is 0.0."""
        for sequence in sequences:
            check_ids(sequence, self.max_model_len, self.max_model_len, self.model.vocabulary)
        return self.scheduler.call(lambda: self.model.score(sequences)).result()

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Serve the weights of ``folder``, full or an adapter on its base, after running requests are done.

        If the weights do not fit the served model, keeps the old weights and raises WeightMismatchError.
        """
        adapter = is_adapter(folder)
        full = None if adapter else read_tensors(folder)
        served = Served(policy_version, digest_weights(folder), folder)

        def change() -> Served:
            base = base_of(folder, [self.base, self.model_path]) if adapter else folder
            tensors = merge_adapter(base, folder, self.model.dtype) if full is None else full
            replace_weights(self.model.module, tensors, folder)
            self.base = base
            self._counts["weight_updates"] += 1
            return served

        self.scheduler.update(change).result()
        LOG.info("serves policy version %d, %s", policy_version, folder)

    def status(self) -> EngineStatus:
        """Identity and state."""
        served, times = self.scheduler.served, self._process.cpu_times()
        return EngineStatus(
            engine=f"transformers-{_transformers_version()}",
            model_path=str(self.model_path),
            policy_version=served.policy_version,
            weights_digest=served.weights_digest,
            template_hash=self.template.digest,
            paused=self.scheduler.paused,
            dtype=str(self.model.dtype).removeprefix("torch."),
            max_model_len=self.max_model_len,
            pid=os.getpid(),
            cpu_seconds=times.user + times.system,
            capabilities=CAPABILITIES,
            weights_path=str(served.folder),
            model_digest=self._model_digest,
            started_at=self._process.create_time(),
        )

    def metrics(self) -> dict[str, float]:
        """Counters since the start."""
        return {**self._counts, "generate_seconds": self.scheduler.generate_seconds}

    @property
    def busy(self) -> bool:
        """Whether any work is queued or running."""
        return self.scheduler.busy

    def close(self) -> None:
        """End the engine's thread."""
        self.scheduler.close()

    def _count(self, request: Request) -> None:
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += sum(map(len, request.prompts))
        self._counts["completion_tokens"] += request.sampled

    def _free_tokens(self) -> int:
        free = (
            torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else psutil.virtual_memory().available
        )
        return max(self.max_model_len, int(free * CACHE_SHARE) // self.model.cache_bytes_per_token)


def _resolve_device(device: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def _resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise UserError(f"dtype {dtype!r}: expected auto or one of {', '.join(known)}")
    return known[dtype]


def _transformers_version() -> str:
    from transformers import __version__

    return __version__
