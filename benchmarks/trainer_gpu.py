"""What the trainer's layouts cost on GPUs: time of a step, use of the device (MFU), memory; and that they agree.

A random model of a 0.6 billion parameter shape trains on random groups that share their prompts. Every layout trains
the same steps from the same start in a trainer group of its own; what its weights answer afterwards is compared with
the plain layout's. ``python benchmarks/trainer_gpu.py --out FILE [--ranks 1 2] [--only plain compile ...]``
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe
from shape_model import build_shape_model

from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.common.errors import TrainerError
from rft_platform.config.home import Home
from rft_platform.experience.record import JudgedRow, RolloutRow, row_id
from rft_platform.experience.store import ExperienceStore
from rft_platform.training.protocol import Layout, StepEvent, TrainRequest
from rft_platform.training.service.trainer_client import TrainerClient, find_or_start_trainer

VOCABULARY = int(os.environ.get("VOCABULARY", "150000"))
CANARIES = 4


@dataclass(frozen=True)
class Variant:
    """One way to train the same rows."""

    name: str
    ranks: int = 1
    layout: Layout = field(default_factory=Layout)
    save_interval: int | None = None
    killed: bool = False  # the group is killed in the middle, and the request made again


def variants(ranks: list[int]) -> list[Variant]:
    """The plain layout first: the others are compared with it."""
    one = [
        Variant("plain"),
        Variant("gradient_checkpointing", layout=Layout(gradient_checkpointing=True)),
        Variant("compile", layout=Layout(compile=True)),
        Variant("cpu_offload", layout=Layout(cpu_offload=True)),
        Variant("background_saves", save_interval=1),
        Variant("killed_and_resumed", save_interval=1, killed=True),
    ]
    two = [
        Variant("plain_2_ranks", ranks=2),
        Variant("cpu_offload_2_ranks", ranks=2, layout=Layout(cpu_offload=True)),
        Variant("background_saves_2_ranks", ranks=2, save_interval=1),
    ]
    return [*(one if 1 in ranks else [Variant("plain")]), *(two if 2 in ranks else [])]


def write_round(folder: Path, groups: int, runs: int, prompt: int, answer: int) -> tuple[Path, Path]:
    """Random rows, each group with one prompt; advantages alternate."""
    rng = np.random.default_rng(0)
    rows, judged = [], []
    for group in range(groups):
        prompt_ids = rng.integers(5, VOCABULARY, prompt).tolist()
        for run in range(runs):
            name = f"{group}-{run}"
            identity = row_id(name, 0)
            ids = rng.integers(5, VOCABULARY, answer).tolist()
            rows.append(
                RolloutRow.from_columns(
                    row_id=identity, task_id=str(group), taskset="random", group_id=str(group), run_id=name, step=0,
                    msg_id=identity, round=1, policy_version=0, engine="random", template_hash="",
                    prompt_ids=prompt_ids, response_ids=ids, rollout_logprobs=[-float(np.log(VOCABULARY))] * answer,
                    loss_mask=[True] * answer, temperature=1.0, top_p=1.0, top_k=-1, finish_reason="length",
                    truncated=True, messages=[], tools=[], response={},
                )
            )  # fmt: skip
            judged.append(JudgedRow(identity, str(group), name, 0, run % 2, {}, "judge", 1.0 if run % 2 else -1.0))
    store = ExperienceStore(folder)
    return store.write_rollouts(1, 0, rows), store.write_judged(1, "judge", judged)


def train(client: TrainerClient, request: TrainRequest, killed: bool) -> tuple[list[StepEvent], float]:
    """The steps of a training and its wall time; killed after its second step and made again where wanted."""
    started, steps = time.perf_counter(), list[StepEvent]()

    def on_step(event: StepEvent) -> None:
        steps.append(event)
        if killed and len(steps) == 2:
            os.kill(client.status()["pid"], signal.SIGKILL)

    try:
        client.train(request, on_step)
    except TrainerError:
        if not killed:
            raise
        client.ensure_running()
        client.train(request, on_step)
    return steps, time.perf_counter() - started


def measure(
    variant: Variant, request: TrainRequest, work: Path, canaries: list[list[int]], device: str
) -> dict[str, Any]:
    """Train with one variant; medians leave out the first step, which compiles and warms up."""
    home = work / variant.name
    client = find_or_start_trainer(
        Home(home).cluster,
        nproc=variant.ranks,
        device=device,
        dtype="bfloat16",
        layout=variant.layout,
    )
    try:
        wanted = replace(request, output=str(home / "checkpoints"), save_interval=variant.save_interval)
        steps, wall = train(client, wanted, variant.killed)
        scores = client.score(canaries)
    finally:
        client.shutdown()
    later = [event.metrics for event in steps[1:] if not event.reported_before] or [event.metrics for event in steps]
    names = (
        "step_seconds",
        "mfu",
        "tokens_per_s",
        "peak_gpu_mb",
        "peak_rss_mb",
        "computed_share",
        "rank_balance",
        "pack_seconds",
        "forward_seconds",
        "backward_seconds",
        "optimizer_seconds",
    )
    return {
        "variant": variant.name,
        "ranks": variant.ranks,
        "steps": len(steps),
        "training_wall_s": wall,
        **{name: statistics.median(metrics[name] for metrics in later) for name in names if name in later[0]},
        "first_step_s": steps[0].metrics["step_seconds"],
        "loss": steps[-1].metrics["loss"],
        "scores": scores,
    }


def main() -> None:
    """Measure what was asked for and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, default=None, help="a model folder in place of the random one")
    parser.add_argument("--only", nargs="+", default=None)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=384)
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="trainer-gpu-"))
    model = given.model or build_shape_model(work / "model")
    rollouts, judged = write_round(work / "rounds", given.groups, given.runs, given.prompt, given.answer)
    request = TrainRequest(
        parent=str(model), parent_version=0, output="", algorithm=AlgorithmSpec(), optimizer=OptimizerSpec(lr=1e-5),
        rollouts=(str(rollouts),), judged=(str(judged),), train_batch_size=given.groups * given.runs // 4, seed=1,
        max_tokens_per_pack=32_768, save_hf_checkpoint="last",
    )  # fmt: skip
    rng = np.random.default_rng(1)
    canaries = [rng.integers(5, VOCABULARY, 256).tolist() for _ in range(CANARIES)]
    found, plain = list[dict[str, Any]](), None
    for variant in variants(given.ranks):
        if given.only and variant.name not in (*given.only, "plain"):
            continue
        try:
            result = measure(variant, request, work, canaries, given.device)
        except Exception as error:  # the others are still worth measuring
            result = {"variant": variant.name, "error": f"{type(error).__name__}: {error}"[-1500:]}
        if "scores" in result:
            scores = np.concatenate([np.asarray(row) for row in result.pop("scores")])
            plain = scores if plain is None else plain
            result["mean_abs_logp_difference_to_plain"] = float(np.abs(scores - plain).mean())
        found.append(result)
        print(json.dumps(result), flush=True)
        given.out.write_text(
            json.dumps({"machine": describe(given.device), "settings": _settings(given), "results": found})
        )


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(given, name) for name in ("groups", "runs", "prompt", "answer")} | {
        "model": "Qwen3 shape, 0.6 billion parameters, random", "dtype": "bfloat16", "optimizer_steps": 4,
    }  # fmt: skip


if __name__ == "__main__":
    main()
