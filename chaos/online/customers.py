"""Customers of the service: they ask, rate and commit, survive its kills, and remember what it acknowledged."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_OK, _UNAVAILABLE = 200, 503
_TIMEOUT = aiohttp.ClientTimeout(60)
_RETRY_S = 0.05
_ENGINE_GONE = b'"code":"engine_unavailable"'
_ENDS = b"data: [DONE]"


@dataclass
class Diary:
    """What customers did, and what the service answered."""

    acknowledged: dict[str, tuple[str, float]] = field(default_factory=dict)  # feedback id -> (message, reward)
    statuses: Counter[str] = field(default_factory=Counter)  # by route
    failed: list[str] = field(default_factory=list)  # chats that were answered with an error
    wrong: list[str] = field(default_factory=list)  # answers of other routes that should never occur
    cut: int = 0  # requests that ended with the process that served them
    engine_kills: list[float] = field(default_factory=list)  # monotonic times; the campaign adds them
    engine_gone: list[float] = field(default_factory=list)  # when a stream ended with the event engine_unavailable


class Customers:
    """Some customers at once. Every second chat of a task completes its group."""

    def __init__(self, root: str, number: int, seed: int, pause_s: float = 0.02) -> None:
        """``pause_s``: average time between two chats of a customer."""
        self.diary = Diary()
        self._pause_s = pause_s
        self._root, self._number, self._seed = root, number, seed
        self._ending = False

    def stop(self) -> None:
        """Let each customer finish: its feedback is repeated until the service has acknowledged it."""
        self._ending = True

    async def live(self) -> None:
        """Ask and rate until ``stop``."""
        async with aiohttp.ClientSession(self._root, timeout=_TIMEOUT) as session:
            await asyncio.gather(*(self._one(session, name) for name in range(self._number)))

    async def _one(self, session: aiohttp.ClientSession, name: int) -> None:
        generator, visits = random.Random(f"{self._seed}/{name}"), 0
        while not self._ending:
            place = {"x-rft-task": f"{name}-{visits // 2}", "x-rft-run": str(visits % 2)}
            visits += 1
            msg_id = await self._ask(session, generator, place)
            if msg_id is None:
                await asyncio.sleep(_RETRY_S)
                continue
            if generator.random() < 0.8:
                await self._rate(session, msg_id, round(generator.random(), 3), f"{self._seed}/{name}/{visits}")
            if generator.random() < 0.1:
                await self._post(session, "/commit", {})
            await asyncio.sleep(generator.expovariate(1 / self._pause_s))

    async def _ask(self, session: aiohttp.ClientSession, generator: random.Random, place: dict[str, str]) -> str | None:
        """The id of an answer; None if the connection was cut."""
        stream = generator.random() < 0.5
        body = {"model": "m", "messages": [{"role": "user", "content": "1+1?"}], "stream": stream}
        try:
            async with session.post("/v1/chat/completions", json=body, headers=place) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.diary.cut += 1
            return None
        if stream and answer.status == _OK and _ENGINE_GONE in content:
            self.diary.engine_gone.append(time.monotonic())
            return None
        self.diary.statuses[f"chat {answer.status}"] += 1
        if answer.status != _OK:
            self.diary.failed.append(f"{answer.status} {content[:200]!r}")
            return None
        if not stream:
            return str(json.loads(content)["id"])
        if _ENDS not in content:
            self.diary.failed.append(f"a stream without its end: {content[-200:]!r}")
            return None
        return str(json.loads(content.split(b"\n", 1)[0].removeprefix(b"data: "))["id"])

    async def _rate(self, session: aiohttp.ClientSession, msg_id: str, reward: float, name: str) -> None:
        """Send feedback until it is acknowledged, or its answer turns out not to be recorded."""
        feedback = {"msg_ids": [msg_id], "reward": reward, "feedback_id": name}
        end = time.monotonic() + 300
        while time.monotonic() < end:
            status = await self._post(session, "/feedback", feedback)
            if status == _OK:
                self.diary.acknowledged[name] = (msg_id, reward)
                return
            if status not in (0, _UNAVAILABLE):
                return
            await asyncio.sleep(_RETRY_S)
        self.diary.wrong.append(f"the feedback {name} was not taken in 5 minutes")

    async def _post(self, session: aiohttp.ClientSession, path: str, body: Any) -> int:
        """The status of an answer; 0 if the connection was cut."""
        try:
            async with session.post(path, json=body) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.diary.cut += 1
            return 0
        self.diary.statuses[f"{path} {answer.status}"] += 1
        if answer.status not in (_OK, _UNAVAILABLE, 404):
            self.diary.wrong.append(f"{path}: {answer.status} {content[:200]!r}")
        return answer.status
