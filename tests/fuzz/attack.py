"""Send random bodies to a running server and note what should never happen."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.fuzz.bodies import Bodies

AT_ONCE = 12
TIMEOUT_S = 300.0


@dataclass
class Findings:
    """What came of the requests."""

    requests: int = 0
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)  # 5xx, broken connections, answers out of form

    def note(self, path: str, body: bytes, why: str) -> None:
        """Remember a failure; the first hundred are enough."""
        if len(self.failures) < 100:
            self.failures.append({"path": path, "why": why[:500], "body": body[:2000].decode(errors="replace")})


async def attack(
    root: str,
    key: Callable[[], str],
    model: str,
    seeds: Iterable[int],
    progress: Callable[[int], None] = lambda done: None,
) -> Findings:
    """One request for each seed to the server at ``root``; ``key`` gives the key of the next request."""
    found, pending, started = Findings(), iter(seeds), time.monotonic()
    async with aiohttp.ClientSession(root, timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
        async with session.get("/openapi.json", headers={"Authorization": f"Bearer {key()}"}) as answer:
            bodies = Bodies(await answer.json(), model)

        async def client() -> None:
            for seed in pending:
                path, body = bodies.make(Random(seed))
                await _send(session, path, body, key(), found)
                found.requests += 1
                progress(found.requests)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    found.seconds = time.monotonic() - started
    return found


async def _send(session: aiohttp.ClientSession, path: str, body: bytes, key: str, found: Findings) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        async with session.post(path, data=body, headers=headers) as answer:
            content = await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        found.statuses[0] += 1
        found.note(path, body, repr(error))
        return
    found.statuses[answer.status] += 1
    if answer.status >= 500:
        found.note(path, body, f"{answer.status}: {content[:300]!r}")
    elif problem := _out_of_form(answer, content):
        found.note(path, body, problem)


def _out_of_form(answer: aiohttp.ClientResponse, content: bytes) -> str | None:
    """Why an answer is not what OpenAI's clients expect; None where it is."""
    if answer.status == 200:
        streamed = answer.content_type == "text/event-stream"
        if streamed and not content.rstrip().endswith(b"[DONE]") and b"event: response." not in content:
            return f"a stream without its end: {content[-200:]!r}"
        if b'"server_error"' in content:
            return f"a server error within a stream: {content[-300:]!r}"
        return None
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status} without an error object: {content[:200]!r}"
    return None if error.get("message") and error.get("code") else f"{answer.status}: an error without message or code"
