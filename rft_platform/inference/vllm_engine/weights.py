"""The weights that vLLM serves. All tensors change or, if one does not fit, none."""

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rft_platform.common.digests import digest_once, digest_weights
from rft_platform.common.errors import EngineError, WeightMismatchError
from rft_platform.inference.serving.weight_files import base_of, check_folder, is_adapter, layout_of
from rft_platform.inference.vllm_engine.adapters import check_adapter

LOG = logging.getLogger(__name__)
ADAPTER_NAME, ADAPTER_ID = "policy", 1
CACHE_RESETS = 50  # attempts to empty the cache, because a finished request frees its blocks with a short delay
CACHE_WAIT_S = 0.02


@dataclass(frozen=True, slots=True)
class Weights:
    """One set of weights: the full weights in ``base``, plus the adapter in ``folder`` if the folders differ."""

    policy_version: int
    weights_digest: str
    folder: Path
    base: Path

    @property
    def adapter(self) -> Path | None:
        """Folder of the adapter; None for full weights."""
        return None if self.folder == self.base else self.folder


class ServedWeights:
    """The weights of one running ``AsyncLLM``. No request may run during ``apply``."""

    def __init__(self, llm: Any, folder: Path, max_lora_rank: int) -> None:
        self.llm = llm
        self.max_lora_rank = max_lora_rank  # 0: vLLM was started without room for an adapter
        self.layout = layout_of(folder)
        self.start = folder
        self.served = Weights(0, digest_weights(folder, digest_once), folder, folder)
        self.adapter: Any = None  # vLLM's LoRARequest, passed with every generation
        self.updates = 0

    def prepare(self, folder: Path, policy_version: int) -> Weights:
        """Check ``folder`` without changing anything. Raises WeightMismatchError if its weights do not fit."""
        if not is_adapter(folder):
            check_folder(self.layout, folder)
            return Weights(policy_version, "", folder, folder)
        if not self.max_lora_rank:
            raise WeightMismatchError(
                f"{folder}: is a LoRA adapter, but this engine was started without adapters: set "
                "engine.max_lora_rank to the adapter's rank or more"
            )
        check_adapter(self.layout, folder, self.max_lora_rank)
        return Weights(policy_version, "", folder, self._base_of(folder))

    def _base_of(self, adapter: Path) -> Path:
        base = base_of(adapter, [self.served.base, self.start])
        if base != self.served.base:
            check_folder(self.layout, base)
        return base

    async def apply(self, target: Weights) -> None:
        """Serve ``target``; if vLLM refuses it, restore the previous weights and raise WeightMismatchError.

        The digest of the files is computed while vLLM loads them.
        """
        before, started = self.served, perf_counter()
        if target.adapter is not None:  # the full weights may have changed since ``prepare``
            target = replace(target, base=await asyncio.to_thread(self._base_of, target.folder))
        digest = asyncio.ensure_future(asyncio.to_thread(digest_weights, target.folder))
        try:
            await self._load(target, loaded=before)
            loaded_s = perf_counter() - started
            target = replace(target, weights_digest=await digest)
        except Exception as error:
            await asyncio.gather(digest, return_exceptions=True)
            LOG.warning("vLLM refuses %s: %s", target.folder, error)
            await self._load(before, loaded=None)
            raise WeightMismatchError(f"{target.folder}: vLLM cannot load these weights: {_reason(error)}") from error
        self.served = target
        self.updates += 1
        seconds = perf_counter() - started
        LOG.info("serves policy version %d, %s", target.policy_version, target.folder)
        LOG.info("vLLM loaded the weights in %.2f s; their digest was known after %.2f s", loaded_s, seconds)

    async def _load(self, target: Weights, loaded: Weights | None) -> None:
        """Load ``target`` into the workers; ``loaded``: the weights there now, None if unknown."""
        if target.adapter is None or loaded is None or loaded.base != target.base:
            await self.llm.collective_rpc("rft_load_weights", args=(str(target.base),))
        await self._load_adapter(target.adapter)
        await self._forget_prefixes()

    async def _load_adapter(self, folder: Path | None) -> None:
        from vllm.lora.request import LoRARequest

        if folder is not None:
            if not await self.llm.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder), load_inplace=True)):
                raise EngineError(f"vLLM did not load the adapter in {folder}")
            self.adapter = LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder))
        elif self.adapter is not None:
            await self.llm.remove_lora(ADAPTER_ID)
            self.adapter = None

    async def _forget_prefixes(self) -> None:
        for _ in range(CACHE_RESETS):
            if await self.llm.reset_prefix_cache():
                return
            await asyncio.sleep(CACHE_WAIT_S)
        raise EngineError(
            "vLLM kept prefixes of the old weights: cache blocks were in use although no request was running"
        )


def _reason(error: Exception) -> str:
    """The last line of the error's text, because vLLM puts the worker's whole traceback into it."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
