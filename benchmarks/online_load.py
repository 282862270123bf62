"""Load on the online service: requests a second, added latency of streams, and memory.

    python benchmarks/online_load.py                     # both parts, 5 minutes of streams
    python benchmarks/online_load.py --stream-s 120

Real processes: an engine that answers at once with fixed tokens (``chaos/online/echo_engine.py``), the service before
it, and the clients. Throughput: as many requests as the service answers, each recorded in SQLite. Streams: 64 clients
that read a streamed answer of 16 events, 10 ms apart, then pause; 8 clients do the same at the bare engine at the same
time, so that both sides see the same machine.
"""

import argparse
import asyncio
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
import machine
import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from chaos.online import echo_service  # noqa: E402
from tests.support.ports import free_port  # noqa: E402

MESSAGES = [
    {"role": "system", "content": "You answer questions about sums. " * 8},
    {"role": "user", "content": "What is 123 + 456? Think, then answer with the number alone."},
]
PAUSE_S = 0.01  # between the events of a streamed answer
THINK_S = 1.0  # mean of a client's pause between two answers
CLIENTS, BARE_CLIENTS, AT_ONCE = 64, 8, 64
GOALS = {"requests_per_s": 1000, "added_p50_ms": 5.0, "added_p99_ms": 25.0, "errors": 0}
_ENDS = b"data: [DONE]"


@dataclass
class Seen:
    """What the clients of one side saw."""

    first_ms: list[float] = field(default_factory=list)  # to the first event
    whole_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Quantiles and counts."""
        cuts = {"first": quantiles(self.first_ms, n=100), "whole": quantiles(self.whole_ms, n=100)}
        return {
            "answers": len(self.whole_ms),
            "errors": len(self.errors),
            **{f"{name}_{what}_ms": round(cut[place], 2) for name, cut in cuts.items()
               for what, place in (("p50", 49), ("p99", 98))},
        }  # fmt: skip


@contextmanager
def started(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server, ready to answer; it ends with the block."""
    process = subprocess.Popen(command, cwd=HERE.parent, env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    try:
        wait_for(port)
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_for(port: int) -> None:
    """Wait until a server listens."""
    import socket

    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")


async def send_many(port: int, seconds: float, stream: bool) -> dict[str, Any]:
    """As many requests as the server answers to ``AT_ONCE`` clients; half a second warms up."""
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 16, "stream": stream}).encode()
    url, counts, errors = f"http://127.0.0.1:{port}/v1/chat/completions", [0], list[str]()
    headers, ending = {"content-type": "application/json", "authorization": "Bearer none"}, asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            while not ending.is_set():
                async with session.post(url, data=body, headers=headers) as answer:
                    content = await answer.read()
                    if answer.status != 200 or (stream and _ENDS not in content):
                        errors.append(f"{answer.status} {content[:100]!r}")
                counts[0] += 1

        clients = [asyncio.create_task(client()) for _ in range(AT_ONCE)]
        await asyncio.sleep(0.5)
        first, began = counts[0], time.perf_counter()
        await asyncio.sleep(seconds)
        done, took = counts[0] - first, time.perf_counter() - began
        ending.set()
        await asyncio.gather(*clients)
    return {"requests_per_s": round(done / took, 1), "all_requests": counts[0], "errors": errors[:5]}


async def stream_answers(port: int, clients: int, seconds: float, seed: int) -> Seen:
    """Clients that read streamed answers and pause between them, for a time."""
    seen, end = Seen(), time.monotonic() + seconds
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 16, "stream": True}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client(number: int) -> None:
            generator = random.Random(f"{seed}/{number}")
            await asyncio.sleep(generator.uniform(0, THINK_S))
            while time.monotonic() < end:
                began, first, content = time.perf_counter(), 0.0, b""
                try:
                    async with session.post(url, data=body, headers=headers) as answer:
                        async for part in answer.content.iter_any():
                            first = first or time.perf_counter()
                            content += part
                    if answer.status != 200 or _ENDS not in content:
                        raise ValueError(f"{answer.status} {content[-100:]!r}")
                except (aiohttp.ClientError, OSError, ValueError) as error:
                    seen.errors.append(repr(error))
                else:
                    seen.first_ms.append(1e3 * (first - began))
                    seen.whole_ms.append(1e3 * (time.perf_counter() - began))
                await asyncio.sleep(generator.expovariate(1 / THINK_S))

        await asyncio.gather(*(client(number) for number in range(clients)))
    return seen


async def watch_memory(pid: int, seconds: float, every_s: float = 1.0) -> list[float]:
    """Resident memory in MB, once a second."""
    process, found, end = psutil.Process(pid), list[float](), time.monotonic() + seconds
    while time.monotonic() < end:
        found.append(round(process.memory_info().rss / 2**20, 1))
        await asyncio.sleep(every_s)
    return found


@contextmanager
def service(pause_s: float, profile: Path | None = None) -> Iterator[tuple[int, int, int, Path]]:
    """Engine and service: the engine's port, the service's port and process id, and the database's file."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port, port = free_port(), free_port()
        engine = [sys.executable, "-m", "chaos.online.echo_engine", str(engine_port), str(pause_s)]
        stack.enter_context(started(engine, engine_port))
        database = folder / "traffic.db"
        given = echo_service.arguments(port, f"sqlite:///{database}", engine_port)
        command = [sys.executable, "-m", "chaos.online.echo_service", *given]
        if profile is not None:
            command[1:1] = ["-m", "cProfile", "-o", str(profile)]
        process = stack.enter_context(started(command, port))
        yield engine_port, port, process.pid, database


def rows_of(database: Path) -> int:
    """Number of recorded calls."""
    with closing(sqlite3.connect(database)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM calls").fetchone()[0])


def wait_for_rows(database: Path, expected: int) -> int:
    """The number of recorded calls, once all that are expected are on disk, or after a minute."""
    end = time.monotonic() + 60
    while rows_of(database) < expected and time.monotonic() < end:
        time.sleep(0.2)
    return rows_of(database)


def throughput(seconds: float, turns: int, profile: Path | None = None) -> dict[str, Any]:
    """Requests a second at the service and at the bare engine: medians of interleaved turns."""
    with service(0.0, profile) as (engine_port, port, pid, database):
        found: dict[str, list[dict[str, Any]]] = {}
        process, cpu, expected = psutil.Process(pid), list[float](), 0
        for _ in range(turns):
            for stream in (False, True):
                kind = "streamed" if stream else "whole"
                used = sum(process.cpu_times()[:2])
                result = asyncio.run(send_many(port, seconds, stream))
                cpu.append(1e3 * (sum(process.cpu_times()[:2]) - used) / result["all_requests"])
                expected += result["all_requests"]
                found.setdefault(kind, []).append(result)
                found.setdefault(f"bare_{kind}", []).append(asyncio.run(send_many(engine_port, seconds / 2, stream)))
        recorded = wait_for_rows(database, expected)
    return {
        **{name: {"requests_per_s": median(each["requests_per_s"] for each in each_turn),
                  "turns": [each["requests_per_s"] for each in each_turn],
                  "errors": sum(len(each["errors"]) for each in each_turn)} for name, each_turn in found.items()},
        "service_cpu_ms_a_request": {"whole": round(median(cpu[::2]), 3), "streamed": round(median(cpu[1::2]), 3)},
        "requests": expected,
        "recorded": recorded,
        "clients": AT_ONCE,
    }  # fmt: skip


def streams(seconds: float) -> dict[str, Any]:
    """Latency of streams through the service and at the bare engine at the same time, and the service's memory."""

    async def measure(engine_port: int, port: int, pid: int) -> tuple[Seen, Seen, list[float]]:
        return await asyncio.gather(
            stream_answers(port, CLIENTS, seconds, 1),
            stream_answers(engine_port, BARE_CLIENTS, seconds, 2),
            watch_memory(pid, seconds),
        )

    with service(PAUSE_S) as (engine_port, port, pid, database):
        asyncio.run(stream_answers(port, CLIENTS, 3, 0))  # imports and connections
        before = rows_of(database)
        used, loads = psutil.Process(pid).cpu_times(), [os.getloadavg()[0]]
        mine, bare, memory = asyncio.run(measure(engine_port, port, pid))
        after, loads = psutil.Process(pid).cpu_times(), [*loads, os.getloadavg()[0]]
        recorded = wait_for_rows(database, before + len(mine.whole_ms)) - before
    through, direct = mine.summary(), bare.summary()
    quarter = memory[len(memory) // 4 :]
    return {
        "seconds": seconds,
        "clients": CLIENTS,
        "bare_clients": BARE_CLIENTS,
        "answers_per_s": round(through["answers"] / seconds, 1),
        "events_an_answer": 16,
        "ms_between_events": 1e3 * PAUSE_S,
        "mean_pause_s": THINK_S,
        "service": through,
        "bare": direct,
        **{f"added_{name}": round(through[name] - direct[name], 2)
           for name in ("first_p50_ms", "first_p99_ms", "whole_p50_ms", "whole_p99_ms")},
        "errors": (mine.errors + bare.errors)[:10],
        "recorded": recorded,
        "service_cpu_share": round((sum(after[:2]) - sum(used[:2])) / seconds, 3),
        "rss_mb": {"quarter": quarter[0], "end": memory[-1], "most": max(memory)},
        "rss_mb_every_30_s": memory[::30],
        "load_1_min": loads,
    }  # fmt: skip


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream-s", type=float, default=300, help="0: skip the streams")
    parser.add_argument("--throughput-s", type=float, default=10, help="of one turn; 0: skip")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="write a cProfile of the service's process to this file")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "online_load.json")
    given = parser.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    found |= {"what": "load on the online service before an engine that answers at once", "goals": GOALS}
    if given.throughput_s:
        found["throughput"] = {
            "machine": {**machine.describe(), "nice": os.nice(0)},
            **throughput(given.throughput_s, given.turns, given.profile),
        }
        print(json.dumps(found["throughput"], indent=1), flush=True)
    if given.stream_s:
        found["streams"] = {"machine": {**machine.describe(), "nice": os.nice(0)}, **streams(given.stream_s)}
        print(json.dumps(found["streams"], indent=1), flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
