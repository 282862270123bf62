"""Async adapter around the transformers engine's worker thread, for the control API."""

import asyncio
from pathlib import Path
from typing import Any

from rft_platform.inference.interface import EngineStatus, Generation, PartialBatch, PauseMode, SamplingParams
from rft_platform.inference.transformers_engine.engine import TransformersEngine


class AsyncEngineAdapter:
    """``ServedEngine`` over a ``TransformersEngine``."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def status(self) -> EngineStatus:
        """Identity and state."""
        return self.engine.status()

    def metrics(self) -> dict[str, float]:
        """Counters since the start."""
        return self.engine.metrics()

    async def render(self, conversations: list[list[dict[str, Any]]], tools: list[Any] | None) -> list[list[int]]:
        """Prompt ids of each conversation."""
        return await asyncio.to_thread(self.engine.template.render, conversations, tools)

    async def generate(
        self, prompts: list[list[int]], sampling: SamplingParams, partial: PartialBatch | None = None
    ) -> tuple[int, list[Generation]]:
        """(policy version, generations); cancelled when the caller disconnects."""
        request = self.engine.submit(prompts, sampling, partial=partial)
        try:
            generations = await asyncio.shield(asyncio.wrap_future(request.future))
        except asyncio.CancelledError:
            self.engine.scheduler.cancel(request)
            raise
        return request.policy_version or 0, generations

    async def decode(self, sequences: list[list[int]]) -> list[str]:
        """Text of each sequence."""
        return await asyncio.to_thread(self.engine.tokenizer.decode_many, sequences)

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token."""
        return await asyncio.to_thread(self.engine.score, sequences)

    async def update_weights(self, folder: Path, policy_version: int) -> None:
        """Serve other weights; if they do not fit, keep the old ones and raise WeightMismatchError."""
        await asyncio.to_thread(self.engine.update_weights, folder, policy_version)

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests; returns once running requests are frozen, ended or finished."""
        await asyncio.wrap_future(self.engine.scheduler.pause(mode))

    async def resume(self) -> None:
        """Serve again."""
        self.engine.scheduler.resume()

    async def sleep(self) -> None:
        """Do nothing: this engine holds little memory between two batches."""
