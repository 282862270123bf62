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
WARM_UP_S = 1.0  # connections are open, and the agents have fallen out of step


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


def pause_s(number: int) -> float:
    """How long the replaying engine thinks about a call: about as long as vLLM on a GPU does for 64 agents."""
    return 0.2 + 0.4 * (number * 37 % 64) / 64


class Agents:
    """Agents of one side, each with a client of its own, kept from measurement to measurement."""

    def __init__(self, side: dict[str, Any]) -> None:
        import openai

        from rft_platform.inference.interface import SamplingParams
        from rft_platform.rollout.recording.clients import RecordingClients
        from rft_platform.rollout.recording.history import RunHistory

        self._model = side["model"]
        self._replayed = side["replayed"]
        self._ending = False
        self._numbers = itertools.count()
        recording = RecordingClients(side["base_url"], 600, api_key=side["keys"][0])
        self._clients = [
            recording.async_client(RunHistory(self._model, SamplingParams(64), number))
            if side["records"]
            else openai.AsyncOpenAI(base_url=side["base_url"], api_key=key, max_retries=0)
            for number, key in enumerate(side["keys"])
        ]

    async def measure(self, window_s: float) -> dict[str, float]:
        """Every agent makes one call after the other; what ends within ``window_s`` counts, once all are talking."""
        seconds: list[float] = []
        first = next(self._numbers) + 1
        talking = [asyncio.ensure_future(self._talk(client, seconds)) for client in self._clients]
        await asyncio.sleep(WARM_UP_S)
        seconds.clear()
        started, cpu = perf_counter(), process_time()
        await asyncio.sleep(window_s)
        wall, used, ended = perf_counter() - started, process_time() - cpu, list(seconds)
        self._ending = True
        await asyncio.gather(*talking)
        self._ending = False
        return {
            "calls_per_s": len(ended) / wall,
            "p50_ms": median(ended) * 1e3,
            "cpu_ms_a_call": used * 1e3 / len(ended),
            "calls": len(ended),
            "all_calls": next(self._numbers) - first,
        }

    async def _talk(self, client: Any, seconds: list[float]) -> None:
        while not self._ending:
            number, began = next(self._numbers), perf_counter()
            answer = await client.chat.completions.create(model=self._model, **request(number))
            seconds.append(perf_counter() - began - (pause_s(number) if self._replayed else 0.0))
            assert answer.choices[0].logprobs is not None


def load() -> None:
    """Measure what is asked for, until standard input ends."""
    with asyncio.Runner() as runner:
        agents: dict[str, Agents] = {}
        for line in sys.stdin:
            side = json.loads(line)
            if side["name"] not in agents:
                agents[side["name"]] = Agents(side)
            print(json.dumps(runner.run(agents[side["name"]].measure(side["window_s"]))), flush=True)


def replay(file: Path) -> None:
    """Answer every call with a recorded answer, after a pause."""
    import socket

    import uvicorn

    answers = [json.dumps(answer).encode() for answer in json.loads(file.read_text())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        number = json.loads(body)["seed"]
        content = answers[number % len(answers)]
        await asyncio.sleep(pause_s(number))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_keep_alive=600)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    load() if sys.argv[1] == "load" else replay(Path(sys.argv[2]))
