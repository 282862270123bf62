"""What recording costs: calls a second, latency and processor time of 64 agents at once, with and without it.

Three sides take turns, many times: ``plain`` (an ordinary openai client at the engine), ``recording`` (our client in
the same process) and ``gateway`` (an ordinary client at the recording gateway, which runs in another process). All
three ask for log-probs and token ids, so that engine and client do the same work. Two engines: ``replay``, a server
that gives a real engine's answers again after 200 to 600 ms, which its latencies leave out, for the cost of a call; and
a real one, for the throughput that is left: the embedded engine with the tiny model, or vLLM on a GPU. Numbers are
medians; changes are medians of the differences within a turn.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import Any

import machine
import recording_load

HERE = Path(__file__).resolve().parent
AGENTS = 64
ANSWERS = 8  # of the real engine, given again and again
SIDES = ("plain", "recording", "gateway")
MAX_LOSS_PERCENT, MAX_P50_MS = 3.0, 2.0  # what is demanded of recording


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One of the other parts, ended with the block."""
    command = [sys.executable, str(HERE / "recording_load.py"), *arguments]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


class Bench:
    """One engine, and the three ways to it."""

    def __init__(
        self,
        name: str,
        url: str,
        key: str,
        model: str,
        window_s: float,
        load: subprocess.Popen[str],
        stack: ExitStack,
    ) -> None:
        from rft_platform.inference.interface import SamplingParams
        from rft_platform.rollout.recording.clients import RecordingClients
        from rft_platform.rollout.recording.history import RunHistory

        clients = RecordingClients(url, 600, api_key=key)
        stack.callback(clients.close)
        histories = [
            RunHistory(model, SamplingParams(64), number, f"bench/{name}/{number}") for number in range(AGENTS)
        ]
        keys = [clients.gateway.register(history) for history in histories]
        plain = {
            "model": model,
            "base_url": url,
            "keys": [key] * AGENTS,
            "records": False,
            "replayed": name == "replay",
            "window_s": window_s,
        }
        gateway = {**plain, "base_url": clients.gateway.base_url, "keys": keys}
        self._load = load
        self._sides = {"plain": plain, "recording": {**plain, "records": True}, "gateway": gateway}
        self._name = name
        self.window_s = window_s
        self.found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}

    def turn(self, number: int) -> None:
        """Measure each side once, another one first each time."""
        for place in range(len(SIDES)):
            side = SIDES[(number + place) % len(SIDES)]
            assert self._load.stdin is not None and self._load.stdout is not None
            cpu = process_time()
            print(json.dumps({"name": f"{self._name}/{side}", **self._sides[side]}), file=self._load.stdin, flush=True)
            found = json.loads(self._load.stdout.readline())
            found["gateway_cpu_ms_a_call"] = (process_time() - cpu) * 1e3 / found["all_calls"]
            if number > 0:  # the first turn warms up
                self.found[side].append(found)

    def result(self) -> dict[str, Any]:
        """Medians of each side, and of the differences to ``plain``."""
        names = ("calls_per_s", "p50_ms", "cpu_ms_a_call", "gateway_cpu_ms_a_call")
        sides = {s: {name: round(median(turn[name] for turn in self.found[s]), 3) for name in names} for s in SIDES}
        return {
            "turns": len(self.found["plain"]),
            "sides": sides,
            "against_plain": {s: self._against(s) for s in SIDES[1:]},
        }

    def _against(self, side: str) -> dict[str, Any]:
        """What a side costs more than ``plain``: medians of the differences within a turn, and their quartiles."""
        pairs = list(zip(self.found["plain"], self.found[side], strict=True))
        losses = [100 * (1 - mine["calls_per_s"] / plain["calls_per_s"]) for plain, mine in pairs]
        p50s = [mine["p50_ms"] - plain["p50_ms"] for plain, mine in pairs]
        cpus = [mine["cpu_ms_a_call"] - plain["cpu_ms_a_call"] for plain, mine in pairs]
        return {
            "throughput_loss_percent": round(median(losses), 2),
            "throughput_loss_quartiles": _quartiles(losses),
            "p50_ms_more": round(median(p50s), 2),
            "p50_ms_quartiles": _quartiles(p50s),
            "cpu_ms_a_call_more": round(median(cpus), 3),
            "within_limits": median(losses) <= MAX_LOSS_PERCENT and median(p50s) <= MAX_P50_MS,
        }


def _quartiles(values: list[float]) -> list[float]:
    return [round(value, 2) for value in quantiles(values, n=4)[::2]]


def real_answers(url: str, key: str, model: str) -> list[dict[str, Any]]:
    """Whole answers of the engine, as they came over the wire."""
    import openai

    with openai.OpenAI(base_url=url, api_key=key) as client:
        create: Any = client.chat.completions.with_raw_response.create
        return [json.loads(create(model=model, **recording_load.request(n)).content) for n in range(ANSWERS)]


@contextmanager
def running_engine(kind: str, work: Path) -> Iterator[Any]:
    """The embedded engine with the tiny model, or vLLM on a GPU with random weights of 0.6 billion parameters."""
    from rft_platform.config.home import Home
    from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
    from rft_platform.recipes.tiny_model import build_model

    if kind == "vllm":
        from shape_model import build_shape_model

        model = build_shape_model(work / "model")
        settings: dict[str, Any] = {"kind": "vllm", "dtype": "bfloat16", "max_model_len": 2048, "start_timeout_s": 240}
    else:
        model = build_model(work / "model")
        settings = {"dtype": "float32", "device": "cpu"}
    with find_or_start_engine(model, Home(work).cluster, EngineSpec(**settings)) as engine:
        try:
            yield engine
        finally:
            engine.shutdown()


def measure(kind: str, turns: int, replay_s: float, engine_s: float) -> dict[str, Any]:
    """Both engines, one after the other, with one set of agents."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder)
        engine = stack.enter_context(running_engine(kind, work))
        name = engine.status().model_path
        (work / "answers.json").write_text(json.dumps(real_answers(engine.base_url, engine.api_key, name)))
        load = stack.enter_context(process("load"))
        replay = stack.enter_context(process("replay", str(work / "answers.json")))
        assert replay.stdout is not None
        port = int(replay.stdout.readline())
        benches = {
            "replay": Bench("replay", f"http://127.0.0.1:{port}/v1", "EMPTY", name, replay_s, load, stack),
            kind: Bench(kind, engine.base_url, engine.api_key, name, engine_s, load, stack),
        }
        results = {}
        for what, bench in benches.items():
            if bench.window_s == 0:
                continue
            for number in range(turns + 1):
                bench.turn(number)
            results[what] = bench.result()
            print(what, json.dumps(results[what]["against_plain"]), flush=True)
        return results


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded", help="vllm needs a GPU")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--replay-s", type=float, default=5, help="seconds measured, of a side and a turn; 0: skip")
    parser.add_argument("--engine-s", type=float, default=10)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "recording_overhead.json")
    given = parser.parse_args()
    found = {
        "what": "cost of recording: 64 agents at once, medians of interleaved turns",
        "machine": machine.describe("cuda" if given.engine == "vllm" else "cpu"),
        "limits": {"throughput_loss_percent": MAX_LOSS_PERCENT, "p50_ms_more": MAX_P50_MS},
        "agents": AGENTS,
        **measure(given.engine, given.turns, given.replay_s, given.engine_s),
    }
    given.out.write_text(json.dumps(found, indent=1, sort_keys=False) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
