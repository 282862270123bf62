"""The steps of a vLLM engine by the number of running answers: their time, that of the scheduler, and of the kernels.

Steps that also read a prompt are counted apart. Runs the uneven rows of ``round_gpu.py`` (groups of 8 answers below
prompts of 60 to 1,000 tokens, answers of 1 to 1,024 that end by chance) on vLLM alone, with the platform's scheduler
and sampling. With more ``--prompts`` than the engine has slots for, prompts begin while others are answered. The first
batch compiles and does not count. In the last batch, the kernels of 20 steps are traced at two places; they are seen
only if vLLM's worker has no process of its own.
``python benchmarks/engine_steps.py --out FILE [--batches 3] [--engine '{"kv_cache_dtype": "fp8"}']`` in an interpreter
that has vLLM, with the repository on its PYTHONPATH. ``--small`` tries the script on a CPU.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
FOLDER = "ENGINE_STEPS_FOLDER"  # environment variable: where the engine process writes
TRACED, TRACE_AT = 20, (150, 550)  # steps, and after how many of the batch
WIDTH = 50  # running answers that a line of the result joins


def timed_scheduler(**options: Any) -> Any:
    """The platform's scheduler, in the engine process, with the times of its steps written after each batch."""
    from rft_platform.inference.vllm_engine.scheduler import scheduler

    made = scheduler(**options)
    base = type(made)
    made.__class__ = type("TimedScheduler", (_Timed, base), {})
    made.steps, made.batch, made.trace = [], 0, None
    return made


class _Timed:
    """Mixin: a step is ``[begin, seconds of schedule, seconds of update, tokens, running answers]``."""

    steps: list[list[float]]
    batch: int
    trace: Any

    def schedule(self, *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        out = super().schedule(*args, **options)  # type: ignore[misc]
        self._trace()
        own = time.perf_counter() - begin
        self.steps.append([begin, own, 0.0, out.total_num_scheduled_tokens, len(self.running)])  # type: ignore[attr-defined]
        return out

    def update_from_output(self, *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        out = super().update_from_output(*args, **options)  # type: ignore[misc]
        if self.steps:  # an asynchronous step may end after the batch
            self.steps[-1][2] += time.perf_counter() - begin
        if not (self.running or self.waiting) and len(self.steps) > TRACED:  # type: ignore[attr-defined]
            if self.trace is not None:  # the batch ended before the traced steps did
                self.trace.__exit__(None, None, None)
            Path(os.environ[FOLDER], f"steps-{self.batch}.json").write_text(json.dumps(self.steps))
            self.steps, self.batch = [], self.batch + 1
        return out

    def _trace(self) -> None:
        import torch

        done, running = len(self.steps), len(self.running)  # type: ignore[attr-defined]
        if not torch.cuda.is_available() or self.batch != int(os.environ[f"{FOLDER}_LAST"]):
            return
        if done in TRACE_AT:
            self.trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.trace.__enter__()
        elif done - TRACED in TRACE_AT and self.trace is not None:
            torch.cuda.synchronize()
            trace, self.trace = self.trace, None
            trace.__exit__(None, None, None)
            times = {each.key: each.self_device_time_total / 1000 / TRACED for each in trace.key_averages()}
            largest = dict(sorted(times.items(), key=lambda item: -item[1])[:12])
            found = {"running": running, "all_ms": sum(times.values()), "largest_ms": largest}
            Path(os.environ[FOLDER], f"kernels-{done}.json").write_text(json.dumps(found))


def by_running(steps: list[list[float]]) -> Iterator[dict[str, float]]:
    """Medians of the steps with about as many running answers, apart by whether a step reads a prompt too."""
    groups: dict[tuple[int, bool], list[tuple[float, float, float]]] = {}
    for (begin, schedule, update, tokens, running), following in pairwise(steps):
        group = groups.setdefault((int(running) // WIDTH * WIDTH, tokens > running), [])
        group.append((following[0] - begin, schedule, update))
    for (running, with_prompt), times in sorted(groups.items(), reverse=True):
        step, schedule, update = (round(1000 * statistics.median(column), 2) for column in zip(*times, strict=True))
        yield {
            "running_from": running, "with_prompt": with_prompt, "steps": len(times),
            "step_ms": step, "schedule_ms": schedule, "update_ms": update,
        }  # fmt: skip


def requests(seed: int, count: int, small: bool) -> tuple[list[Any], list[Any]]:
    """``count`` prompts of a batch, each 8 times, and the sampling parameters of each answer."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(seed)
    prompts, sampling = [], []
    for _ in range(count):
        ids = [rng.randrange(3, 250 if small else 150_000) for _ in range(rng.randrange(60, 100 if small else 1000))]
        for _ in range(8):
            length = min(100 if small else 1024, 1 + int(rng.expovariate(1 / 600)))
            prompts.append({"prompt_token_ids": ids})
            sampling.append(
                SamplingParams(
                    max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
            )  # fmt: skip
    return prompts, sampling


def main() -> None:
    """Run the batches and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=3, help="three or more")
    parser.add_argument("--prompts", type=int, help="of a batch, each with 8 answers; default: 64 (with --small 4)")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON object of options of vLLM's LLM")
    parser.add_argument("--model", type=Path, help="folder; default: a random model of the shape of Qwen3 0.6B")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    if given.batches < 3:
        parser.error("--batches: give three or more, because the first and the last do not count")
    work = Path(tempfile.mkdtemp())
    os.environ |= {FOLDER: str(work), f"{FOLDER}_LAST": str(given.batches - 1)}
    from machine import describe
    from shape_model import build_shape_model
    from vllm import LLM

    model = given.model or build_shape_model(work / "model", "0.6b")
    sizes = {"max_model_len": 200} if given.small else {"max_model_len": 2100, "gpu_memory_utilization": 0.5}
    begin = time.perf_counter()
    engine = LLM(
        str(model), scheduler_cls="engine_steps.timed_scheduler", logprobs_mode="processed_logprobs", seed=0,
        generation_config="vllm", **sizes | given.engine,
    )  # fmt: skip
    prompts = given.prompts or (4 if given.small else 64)
    result: dict[str, Any] = {
        "machine": describe("cpu" if given.small else "cuda"), "engine": given.engine, "prompts": prompts,
        "start_s": round(time.perf_counter() - begin, 1), "batches": [],
    }  # fmt: skip
    for seed in range(given.batches):
        begin = time.perf_counter()
        answers = engine.generate(*requests(seed, prompts, given.small), use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        result["batches"].append({"seconds": seconds, "tokens": tokens, "tokens_per_s": round(tokens / seconds)})
        print(result["batches"][-1], flush=True)
    counted = [json.loads((work / f"steps-{batch}.json").read_text()) for batch in range(1, given.batches - 1)]
    result["steps"] = [list(by_running(steps)) for steps in counted]
    result["kernels"] = [json.loads(file.read_text()) for file in sorted(work.glob("kernels-*.json"))]
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
