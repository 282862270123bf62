"""Whether the serving engine answers, for ``/health``."""

import asyncio
import time
from typing import Any

from rft_platform.common.errors import RftError
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.history import RunHistory
from rft_platform.rollout.recording.httpx_compat import wire
from rft_platform.serving.releases.routing import ServedEngine

_TIMEOUT_S = 0.8  # health checks of load balancers often wait one second
_FRESH_S = 2.0  # callers without a key may ask at any rate: the engine is asked at most once in this time


class EngineProbe:
    """Asks the engine for its list of models, which it answers beside its work; for use in one event loop."""

    def __init__(self, connections: Any) -> None:
        """``connections`` is the gateway's HTTP client."""
        self._connections = connections
        self._answers = False
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def __call__(self, engine: ServedEngine | None) -> dict[str, Any]:
        """``engine`` ("answers", "does not answer", "not started") and ``policy_version`` (None before an engine)."""
        if engine is None:
            return {"engine": "not started", "policy_version": None}
        async with self._lock:
            if time.monotonic() - self._asked_at > _FRESH_S:
                self._answers, self._asked_at = await self._ask(engine), time.monotonic()
        state = "answers" if self._answers else "does not answer"
        return {"engine": state, "policy_version": engine.status.policy_version}

    async def _ask(self, engine: ServedEngine) -> bool:
        history = RunHistory(engine.status.model_path, SamplingParams(1), 0)
        transport = engine.clients.async_transport(history, self._connections)
        timeout = dict.fromkeys(("connect", "read", "write", "pool"), _TIMEOUT_S)
        url = wire.URL(engine.base_url.rstrip("/") + "/models")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                response = await transport.handle_async_request(
                    wire.Request("GET", url, extensions={"timeout": timeout})
                )
                await response.aread()
        except (wire.TransportError, RftError, TimeoutError):
            return False
        return bool(response.status_code == 200)
