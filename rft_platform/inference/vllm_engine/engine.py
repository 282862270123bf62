"""Adapter of vLLM's engine for the control API: batches, weights, pauses, counters."""

import asyncio
import functools
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rft_platform.common.errors import EngineError, UserError
from rft_platform.inference.interface import EngineStatus, Generation, PartialBatch, PauseMode, SamplingParams
from rft_platform.inference.serving.weight_files import model_digest
from rft_platform.inference.vllm_engine.admission import Admission
from rft_platform.inference.vllm_engine.sampling_conversion import (
    completions_of,
    prompt_number,
    prompt_seed,
    sampling_params,
    scores_of,
    scoring_params,
)
from rft_platform.inference.vllm_engine.server_settings import ServerSettings
from rft_platform.inference.vllm_engine.weights import ServedWeights
from rft_platform.openai_api.schema import ChatBody
from rft_platform.openai_api.templates import ChatTemplate, TemplateLimitError
from rft_platform.openai_api.tokenizer import PolicyTokenizer, check_ids, check_prompt, check_text

CAPABILITIES = [
    "chat",
    "completions",
    "tokens",
    "score",
    "logprobs",
    "tools",
    "reasoning",
    "stream",
    "pause",
    "update_weights",
]


class VllmEngine:
    """A ``ServedEngine`` on vLLM's ``AsyncLLM``, in the same process and event loop."""

    def __init__(self, llm: Any, settings: ServerSettings, end: Callable[[], None]) -> None:
        """``llm``: vLLM's engine client; its ``generate`` is replaced by ``_follow_policy``.

        ``end`` ends the server.
        """
        folder = Path(settings.model_path)
        self.llm = llm
        self.settings = settings
        self.admission = Admission(wake=llm.wake_up, end=end)
        self.weights = ServedWeights(llm, folder, settings.options.max_lora_rank)
        self.tokenizer = PolicyTokenizer(folder)
        self.template = ChatTemplate(self.tokenizer, settings.chat_template, settings.template_options)
        self._model_digest = model_digest(folder)
        self.max_model_len = settings.context()
        self.vocabulary = int(llm.model_config.get_vocab_size())
        self.counts = {"requests": 0.0, "prompt_tokens": 0.0, "completion_tokens": 0.0}
        self._frozen = False
        self._ids = itertools.count()
        self._process = psutil.Process()
        self._generate = llm.generate
        llm.generate = self._follow_policy

    async def warm_up(self) -> None:
        """Run one request of each kind, because the first takes seconds and no caller should wait for it."""
        await asyncio.to_thread(self.template.check)
        await self.generate([[0, 0]], SamplingParams(2, n=2))
        await self.score([[0, 0]])
        self.counts = dict.fromkeys(self.counts, 0.0)
        self.admission.busy_seconds = 0.0

    async def render(self, conversations: list[list[dict[str, Any]]], tools: list[Any] | None) -> list[list[int]]:
        """Prompt ids of each conversation."""
        return await asyncio.to_thread(self.template.render, conversations, tools)

    def check_rendering(self, chat: ChatBody) -> None:
        """Raise UserError if the template exceeds its limits or the prompt is too long.

        vLLM itself renders in its event loop, without limits.
        """
        try:
            text = self.template.text(chat.conversation, chat.tools_on_offer, chat.chat_template_kwargs)
        except TemplateLimitError:
            raise
        except UserError:
            return  # vLLM reports the error itself
        check_text(text, self.max_model_len)

    async def decode(self, sequences: list[list[int]]) -> list[str]:
        """Text of each sequence."""
        return await asyncio.to_thread(self.tokenizer.decode_many, sequences)

    async def generate(
        self, prompts: list[list[int]], sampling: SamplingParams, partial: PartialBatch | None = None
    ) -> tuple[int, list[Generation]]:
        """(policy version, generations); cancelled when the caller disconnects."""
        for prompt in prompts:
            check_prompt(prompt, self.max_model_len, self.vocabulary)
        before = [0] * len(prompts) if partial is None else partial.sampled
        params = [
            sampling_params(sampling, number, self.max_model_len - len(prompt), sampled)
            for number, (prompt, sampled) in enumerate(zip(prompts, before, strict=True))
        ]
        async with self.admission.request():
            version = self.weights.served.policy_version
            outputs = await self._all(prompts, params, partial)
        self.counts["requests"] += 1
        done = [Generation(prompts[i], completions_of(each, sampling.n), version) for i, each in enumerate(outputs)]
        self.counts["prompt_tokens"] += sum(map(len, prompts))
        self.counts["completion_tokens"] += sum(len(c.token_ids) for each in done for c in each.completions)
        return version, done

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1; the first token's is 0.0."""
        for sequence in sequences:
            check_ids(sequence, self.max_model_len, self.max_model_len, self.vocabulary)
        if self._frozen:
            raise EngineError(
                "vLLM scores nothing while requests are frozen (pause keep): resume first, or pause with wait"
            )
        longer = [sequence for sequence in sequences if len(sequence) > 1]
        async with self.admission.request(control=True):
            outputs = await self._all(longer, [scoring_params() for _ in longer])
        scores = iter([scores_of(output) for output in outputs])
        return [next(scores) if len(sequence) > 1 else [0.0] for sequence in sequences]

    async def update_weights(self, folder: Path, policy_version: int) -> None:
        """Serve other weights once running requests have finished; on WeightMismatchError the old ones stay."""
        change = await asyncio.to_thread(self.weights.prepare, folder, policy_version)
        if self._frozen:
            await self._thaw()
        async with self.admission.update():
            await self.weights.apply(change)

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests; returns once running requests are frozen, ended or finished."""
        await self.admission.pause()
        if mode == "keep":
            self._frozen = True
            await self.llm.pause_generation(mode="keep", clear_cache=False)
            return
        if mode == "abort":
            await self.llm.pause_generation(mode="abort", clear_cache=False)
            await self._thaw()  # vLLM itself need not stay paused, because the admission holds new requests
        elif self._frozen:
            await self._thaw()
        await self.admission.drained()

    async def resume(self) -> None:
        """Serve again."""
        if self._frozen:
            await self._thaw()
        await self.admission.resume()

    async def sleep(self) -> None:
        """Free the GPU's memory: the weights move to host memory, the cache is dropped."""
        if not self.settings.options.sleeps:
            return
        if self._frozen:
            await self._thaw()
        await self.admission.sleep(self.llm.sleep)

    def status(self) -> EngineStatus:
        """Identity and state."""
        served = self.weights.served
        return EngineStatus(
            engine=f"vllm-{_vllm_version()}",
            model_path=self.settings.model_path,
            policy_version=served.policy_version,
            weights_digest=served.weights_digest,
            template_hash=self.template.digest,
            paused=self.admission.paused,
            dtype=str(self.llm.model_config.dtype).removeprefix("torch."),
            max_model_len=self.max_model_len,
            pid=os.getpid(),
            cpu_seconds=self._cpu_seconds(),
            capabilities=CAPABILITIES + (["lora"] if self.settings.options.max_lora_rank else []),
            weights_path=str(served.folder),
            model_digest=self._model_digest,
            started_at=self._process.create_time(),
        )

    def metrics(self) -> dict[str, float]:
        """Counters since the start."""
        return {
            **self.counts,
            "weight_updates": float(self.weights.updates),
            "generate_seconds": self.admission.busy_seconds,
        }

    async def _thaw(self) -> None:
        await self.llm.resume_generation()
        self._frozen = False

    async def _all(self, prompts: list[list[int]], params: list[Any], partial: PartialBatch | None = None) -> list[Any]:
        """The last output of every prompt, None if it never began; if one fails, the others are cancelled."""
        names = [f"rft-{next(self._ids)}" for _ in prompts]
        free = asyncio.Semaphore(len(prompts) if partial is None else partial.at_once)
        enough = asyncio.Event()

        async def one(name: str, prompt: list[int], param: Any) -> Any:
            async with free:
                return None if enough.is_set() else await self._one(name, prompt, param)

        tasks = [asyncio.ensure_future(one(*each)) for each in zip(names, prompts, params, strict=True)]
        try:
            if partial is not None:
                await self._wait_for_groups(tasks, partial, enough)
                while left := [name for name, task in zip(names, tasks, strict=True) if not task.done()]:
                    await self.llm.abort(left)
                    await asyncio.wait(tasks, timeout=1.0)  # a request that vLLM did not know yet is aborted again
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _wait_for_groups(
        self, tasks: list["asyncio.Task[Any]"], partial: PartialBatch, enough: asyncio.Event
    ) -> None:
        """Wait until all prompts of enough groups have ended, or one has failed; then set ``enough``."""
        left = Counter(partial.groups)

        def ended(group: int, task: "asyncio.Task[Any]") -> None:
            left[group] -= 1
            failed = task.cancelled() or task.exception() is not None
            if failed or sum(not count for count in left.values()) >= partial.enough:
                enough.set()

        for group, task in zip(partial.groups, tasks, strict=True):
            task.add_done_callback(functools.partial(ended, group))
        if len(left) >= partial.enough:
            await enough.wait()

    async def _one(self, request_id: str, prompt: list[int], params: Any) -> Any:
        from vllm.inputs.engine import tokens_input

        final = None
        inputs = tokens_input(prompt)
        async for output in self._generate(inputs, params, request_id, lora_request=self.weights.adapter):
            final = output
        if final is None:
            raise EngineError("vLLM ended a request without an answer; its log says why")
        return final

    async def _follow_policy(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """``AsyncLLM.generate`` for vLLM's own routes.

        Applies the policy's adapter, the context limit and the platform's seeds, and counts tokens.
        """
        ids = prompt.get("prompt_token_ids") or []
        check_prompt(ids, self.max_model_len, self.vocabulary)
        if sampling_params.seed is not None:
            sampling_params.seed = prompt_seed(sampling_params.seed, prompt_number(request_id))
        room = self.max_model_len - len(ids)
        sampling_params.max_tokens = min(sampling_params.max_tokens or room, room)
        options["lora_request"] = self.weights.adapter
        self.counts["prompt_tokens"] += len(ids)
        async for output in self._generate(prompt, sampling_params, request_id, **options):
            self.counts["completion_tokens"] += sum(len(choice.token_ids) for choice in output.outputs)
            yield output

    def _cpu_seconds(self) -> float:
        """Processor seconds of the server and its child processes."""
        total = 0.0
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def _vllm_version() -> str:
    from vllm import __version__

    return __version__
