"""Fuzz a real engine and a real recording gateway: random request bodies, no 5xx, no crash, no growing memory.

    python benchmarks/fuzz_servers.py --requests 100000 --seed 1

Half of the bodies go to the engine, half to the gateway. Writes ``results/fuzz_servers.json``; exit code 1 where a
request failed.
"""

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the bodies are the tests' own

from tests.fuzz.attack import Findings, attack  # noqa: E402

if TYPE_CHECKING:
    from rft_platform.inference.client import EngineClient

CALLS_A_RUN = 200  # then the run ends, as runs do, and its record goes with it
MAX_MODEL_LEN = 64
SAMPLE_EVERY = 1000  # requests between two measurements of the memory
REST_S = 20  # after the last request: an idle engine gives its cache's memory back


class Gateway:
    """A recording gateway in a process of its own."""

    def __init__(self, url: str, key: str, model: str) -> None:
        command = [sys.executable, __file__, "--serve-gateway", url, key, model]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._calls = itertools.count()
        self._key = ""
        self.root = self._ask()

    def key(self) -> str:
        """The key for the next call."""
        if next(self._calls) % CALLS_A_RUN == 0:
            self._key = self._ask()
        return self._key

    def _ask(self) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


def serve_gateway(url: str, key: str, model: str) -> None:
    """First line in: the address out. Each further line: a new run, whose key is the answer; older ones end."""
    from rft_platform.inference.interface import SamplingParams
    from rft_platform.rollout.recording.clients import RecordingClients
    from rft_platform.rollout.recording.history import RunHistory

    clients = RecordingClients(url, 300, api_key=key)
    runs: list[RunHistory] = []
    for number, _ in enumerate(sys.stdin):
        if number == 0:
            print(clients.gateway.base_url.removesuffix("/v1"), flush=True)
            continue
        runs.append(RunHistory(model, SamplingParams(2), number, f"r0001-b0000/t{number:05d}/000"))
        if len(runs) > 2:  # the one before may still have calls under way
            clients.end(runs.pop(0))
        print(clients.gateway.register(runs[-1]), flush=True)
    clients.close()


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    return round(psutil.Process(pid).memory_info().rss / 2**20, 1)


def summary(found: Findings, memory: list[float]) -> dict[str, Any]:
    """What the result file says of one server."""
    return {
        "requests": found.requests,
        "seconds": round(found.seconds, 1),
        "statuses": {str(status): count for status, count in sorted(found.statuses.items())},
        "server_errors": sum(count for status, count in found.statuses.items() if status >= 500 or status == 0),
        "failures": found.failures,
        "rss_mb": memory,
    }


async def measured(what: str, pid: int, *arguments: Any) -> dict[str, Any]:
    """Attack one server and watch its memory."""
    memory = [memory_mb(pid)]

    def progress(done: int) -> None:
        if done % SAMPLE_EVERY == 0:
            memory.append(memory_mb(pid))
            print(f"{what}: {done} requests, {memory[-1]} MB", flush=True)

    return summary(await attack(*arguments, progress), memory)


async def fuzz(engine: "EngineClient", gateway: Gateway, given: argparse.Namespace) -> dict[str, Any]:
    """Attack both servers side by side."""
    status, half, first = engine.status(), given.requests // 2, given.seed * 10**9
    name, root, end = status.model_path, engine.base_url.removesuffix("/v1"), time.monotonic() + 60 * given.minutes

    def seeds(start: int) -> Iterator[int]:
        return itertools.takewhile(lambda _: time.monotonic() < end, range(start, start + half))

    sides = await asyncio.gather(
        measured("engine", status.pid, root, lambda: engine.api_key, name, seeds(first)),
        measured("gateway", gateway.process.pid, gateway.root, gateway.key, name, seeds(first + half)),
    )
    await asyncio.sleep(REST_S)
    for side, pid in zip(sides, (status.pid, gateway.process.pid), strict=True):
        side["rss_mb_at_rest"] = memory_mb(pid)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "seed": given.seed,
        "engine": sides[0],
        "gateway": sides[1],
        "engine_lives": engine.status().pid == status.pid,
        "gateway_lives": gateway.process.poll() is None,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after so long")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "fuzz_servers.json")
    parser.add_argument("--serve-gateway", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve_gateway:
        serve_gateway(*given.serve_gateway)
        return 0
    from rft_platform.config.home import Home
    from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
    from rft_platform.recipes.tiny_model import build_model

    with tempfile.TemporaryDirectory() as work:
        home = Path(work)
        model = build_model(home / "tiny")
        settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": MAX_MODEL_LEN}
        with find_or_start_engine(model, Home(home).cluster, EngineSpec(kind="transformers", **settings)) as engine:
            gateway = Gateway(engine.base_url, engine.api_key, engine.status().model_path)
            try:
                result = asyncio.run(fuzz(engine, gateway, given))
            finally:
                gateway.process.terminate()
                gateway.process.communicate()
                log = (home / "logs" / "engine.log").read_text()
                engine.shutdown()
    result["tracebacks_in_the_engine_log"] = log.count("Traceback")
    given.output.parent.mkdir(exist_ok=True)
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    failed = [side for side in ("engine", "gateway") if result[side]["failures"]]
    sent = sum(result[side]["requests"] for side in ("engine", "gateway"))
    print(f"{sent} requests, failures: {', '.join(failed) or 'none'}; {given.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
