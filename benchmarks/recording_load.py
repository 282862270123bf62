"""The two sides of ``recording_overhead.py`` that run as processes of their own.

``load``: agents that call a model at the same time. Reads one measurement a line on standard input, answers each on
standard output. ``replay FILE``: an engine that is never the bottleneck; it answers with what a real engine answered,
after a pause, and says its port on standard output.
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

MESSAGES = [
    {"role": "system", "content": "You answer questions about sums. " * 8},
    {"role": "user", "content": "What is 123 + 456? Think, then answer with the number alone."},
]


def request(number: int) -> dict[str, Any]:
    """The fields of a call: what recording needs is asked for on every side, so that all do equal work."""
    return {
        "messages": MESSAGES,
        "max_tokens": 16 + 16 * (number % 4),
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": number,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }


class Agents:
    """Agents of one side, each with a client of its own, kept from measurement to measurement."""

    def __init__(self, side: dict[str, Any]) -> None:
        import openai

        from rft_platform.inference.interface import SamplingParams
        from rft_platform.rollout.history import RunHistory
        from rft_platform.rollout.recording import RecordingClients

        self._model = side["model"]
        self._numbers = itertools.count()
        recording = RecordingClients(side["base_url"], 600)
        self._clients = [
            recording.async_client(RunHistory(self._model, SamplingParams(64), number))
            if side["records"]
            else openai.AsyncOpenAI(base_url=side["base_url"], api_key=key, max_retries=0)
            for number, key in enumerate(side["keys"])
        ]

    async def measure(self, calls: int) -> dict[str, float]:
        """Every agent makes ``calls`` calls, one after the other."""
        await asyncio.gather(*(self._talk(client, 1, []) for client in self._clients))  # connections are open
        seconds: list[float] = []
        started, cpu = perf_counter(), process_time()
        await asyncio.gather(*(self._talk(client, calls, seconds) for client in self._clients))
        wall = perf_counter() - started
        used = (process_time() - cpu) / len(seconds)
        return {
            "calls_per_s": len(seconds) / wall,
            "p50_ms": median(seconds) * 1e3,
            "cpu_ms_a_call": used * 1e3,
            "calls": len(seconds),
        }

    async def _talk(self, client: Any, calls: int, seconds: list[float]) -> None:
        for _ in range(calls):
            began = perf_counter()
            answer = await client.chat.completions.create(model=self._model, **request(next(self._numbers)))
            seconds.append(perf_counter() - began)
            assert answer.choices[0].logprobs is not None


def load() -> None:
    """Measure what is asked for, until standard input ends."""
    with asyncio.Runner() as runner:
        agents: dict[str, Agents] = {}
        for line in sys.stdin:
            side = json.loads(line)
            if side["name"] not in agents:
                agents[side["name"]] = Agents(side)
            print(json.dumps(runner.run(agents[side["name"]].measure(side["calls"]))), flush=True)


def replay(file: Path) -> None:
    """Answer every call with a recorded answer, 100 to 300 ms after it came."""
    import socket

    import uvicorn

    answers = [json.dumps(answer).encode() for answer in json.loads(file.read_text())]
    numbers = itertools.count()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        number = next(numbers)
        content = answers[number % len(answers)]
        await asyncio.sleep(0.1 + 0.2 * (number * 37 % 64) / 64)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_keep_alive=600)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    load() if sys.argv[1] == "load" else replay(Path(sys.argv[2]))
