"""The training phase alone: tokens a second, use of the GPUs, memory, compilations, and a kernel profile.

A random model of the shape of a Qwen3 (``--shape``), or its adapter (``--lora RANK``), trains on groups of 8 rows of
two mixes: ``even`` (prompts of about 60 tokens, answers of 512) and ``uneven`` (prompts of 60 to 1,000 tokens, answers
that end by chance, 1,024 at most). The MFU is relative to the data sheet of the device, as in the trainer's metrics.
``python benchmarks/training_step_gpu.py --out FILE [--packs 16384 32768] [--mixes even uneven] [--profile]``

``torchrun --nproc-per-node 4 benchmarks/training_step_gpu.py --out FILE`` trains the same rows with FSDP2 on 4 GPUs: a
step's groups are divided as the trainer divides them, and the figures are those of all ranks together.
"""

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe
from shape_model import SHAPES, VOCABULARY, build_shape_model

from rft_platform.algorithms.spec import AlgorithmSpec, LoraSpec, OptimizerSpec
from rft_platform.training.data.samples import Sample, rollout_sample
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.loop.step_metrics import DeviceClock
from rft_platform.training.loop.training_run import share_of_rank
from rft_platform.training.models.loading import compiled_graphs, load_policy
from rft_platform.training.models.optimizer import apply_step, build_optimizer, clip_gradients
from rft_platform.training.packed.flops import TrainingCost, added_flops, peak_flops
from rft_platform.training.packed.packed_policy import set_longest_row, warm_up
from rft_platform.training.protocol import Layout

GROUPS, RUNS, LONGEST = 64, 8, 1024
LONG = 16_512  # tokens of a row of the mix ``long``, prompt included


def rows_of(mix: str, seed: int) -> list[Sample]:
    """Rows of a round: 64 groups of 8 over one prompt each."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(GROUPS if mix != "long" else 4):
        prompt = rng.integers(0, VOCABULARY, {"even": 60, "long": 512}.get(mix) or int(rng.integers(60, 1000)))
        for run in range(RUNS):
            count = {"even": 512, "long": LONG - 512}.get(mix) or min(LONGEST, 1 + int(rng.geometric(1 / 600)))
            answer = rng.integers(0, VOCABULARY, count)
            rows.append(
                rollout_sample(
                    f"{group}-{run}", prompt, answer, np.full(count, -11.9), np.ones(count, bool),
                    advantage=1.0 if run % 2 else -1.0,
                )
            )  # fmt: skip
    return rows


def steps(
    policy: Any, optimizer: Any, ranks: Ranks, mix: str, max_tokens: int, share: bool | None, count: int
) -> Iterator[dict[str, Any]]:
    """Optimiser steps over fresh rows, measured."""
    for step in range(count):
        rows = share_of(ranks, rows_of(mix, 1000 + step), TrainingCost.of(policy))
        torch.cuda.reset_peak_memory_stats()
        before, clock = compiled_graphs(), DeviceClock(policy.device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        metrics = accumulate_gradients(
            policy, rows, AlgorithmSpec(), max_tokens_per_pack=max_tokens, reduce=ranks.reduce,
            world_size=ranks.world_size, share_prefixes=share, clock=clock,
        )  # fmt: skip
        norm = clip_gradients(policy.parameters(), 1.0)
        apply_step(optimizer, OptimizerSpec(lr=1e-6), step)
        torch.cuda.synchronize()
        seconds = ranks.largest(time.perf_counter() - start)
        peak = ranks.world_size * peak_flops(policy.device, torch.bfloat16)
        yield {
            "seconds": round(seconds, 3),
            "tokens_per_s": round(metrics["tokens_unpacked"] / seconds),
            "mfu": round(metrics["flops"] / seconds / peak, 4),
            "loss": metrics["loss"],
            "grad_norm": norm,
            "compiled": compiled_graphs() - before,
            "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            **{
                k: round(metrics[k], 4)
                for k in ("packs", "computed_share", "padding_share", "flops_share", "rank_balance")
            },
            **{k: round(v, 3) for k, v in clock.seconds().items()},
        }


def share_of(ranks: Ranks, rows: list[Sample], cost: TrainingCost) -> list[Sample]:
    """The rows of this rank: whole groups, about as many operations as each other rank has."""
    group, costs = np.repeat(np.arange(len(rows) // RUNS), RUNS), added_flops(cost, rows)
    return [rows[index] for index in share_of_rank(np.arange(len(rows)), group, costs, ranks.rank, ranks.world_size)]


def profile(policy: Any, optimizer: Any, ranks: Ranks, mix: str, max_tokens: int, share: bool | None) -> str:
    """Where the time of a step goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        list(steps(policy, optimizer, ranks, mix, max_tokens, share, 1))
    table: str = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90)
    return table


def main() -> None:
    """Measure what was asked for and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank")
    parser.add_argument("--packs", type=int, nargs="+", default=[32_768])
    parser.add_argument("--mixes", nargs="+", default=["even", "uneven"], choices=["even", "uneven", "long"])
    parser.add_argument("--share", nargs="+", default=["auto"], choices=["auto", "yes", "no"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument(
        "--once", nargs="+", default=["no"], choices=["no", "yes"], help="gather weights, sum gradients once a step"
    )
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    joined = Ranks.join("cuda", Layout(compile=not given.eager, gradient_checkpointing=given.checkpointing))
    model = Path(tempfile.gettempdir()) / f"shape-{given.shape}"
    folder = Path(joined.from_first(lambda: str(build_shape_model(model, given.shape))))
    lora = LoraSpec(given.lora, given.lora) if given.lora else None
    found: list[dict[str, Any]] = []
    for max_tokens, once in itertools.product(given.packs, given.once):
        ranks = replace(joined, layout=replace(joined.layout, reduce_once=once == "yes"))
        policy = load_policy(folder, ranks, torch.bfloat16, lora=lora)
        optimizer = build_optimizer(policy.model, OptimizerSpec(lr=1e-6))
        set_longest_row(policy, LONG if "long" in given.mixes else None)
        start = time.perf_counter()
        warm_up(policy, max_tokens)
        torch.cuda.synchronize()
        if ranks.is_first:
            print(
                "compiling took", round(time.perf_counter() - start, 1), "s,", compiled_graphs(), "graphs", flush=True
            )
        for mix in given.mixes:
            for name in given.share:
                share = {"auto": None, "yes": True, "no": False}[name]
                case = {"mix": mix, "max_tokens": max_tokens, "share": name, "compiled": not given.eager}
                case |= {"checkpointing": given.checkpointing, "ranks": ranks.world_size, "once": once}
                try:
                    case["steps"] = list(steps(policy, optimizer, ranks, mix, max_tokens, share, given.steps))
                    if given.profile:
                        table = profile(policy, optimizer, ranks, mix, max_tokens, share)
                        if ranks.is_first:
                            given.out.with_suffix(f".{mix}-{name}-{max_tokens}.txt").write_text(table)
                except Exception as error:  # the others are still worth measuring
                    case["error"] = f"{type(error).__name__}: {error}"[-1500:]
                found.append(case)
                if not ranks.is_first:
                    continue
                for line in case.get("steps", []) or [case]:
                    print(mix, max_tokens, name, once, json.dumps(line), flush=True)
                given.out.write_text(json.dumps({"machine": describe("cuda"), "results": found}, indent=1))
        del policy, optimizer
        gc.collect()
        torch.cuda.empty_cache()
    joined.leave()


if __name__ == "__main__":
    main()
