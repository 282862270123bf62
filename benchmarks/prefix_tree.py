"""Prefix-tree packing beside rows that share nothing: time of the training phase, and equal gradients.

Two shapes of a group of 8, as agents make them:

- ``prompt``: one prompt of 1,024 tokens, completions of 256;
- ``turns``: runs of 8 turns of 256 tokens over a prompt of 512; each turn's prompt is the whole conversation so far.

Three ways to train on the same rows, by the same trainer (forward, backward, clipping, AdamW):

- ``tree``: as the trainer packs them;
- ``separate``: every row by itself, packed without padding;
- ``merged``: the turns of a run as one row, which shares nothing with other runs (for ``prompt`` that is ``separate``).

All start from equal weights and must give equal gradients: float32, 1e-5 of the gradient's norm. On CPU the models are
tiny ones of 1 and 10 million parameters in float32; with ``--device cuda`` equality is shown on those and time is taken
on a Qwen3-0.6B shape with bfloat16 activations, where attention is flex_attention under a block mask. Repeats of the
ways alternate, so that a drift of the machine hits all of them.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import describe
from shape_model import build_shape_model

from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.recipes.tiny_model import build_model
from rft_platform.training.data.samples import Sample
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.models.loading import load_policy
from rft_platform.training.models.optimizer import apply_step, build_optimizer, clip_gradients
from rft_platform.training.packed.packed_policy import PackedPolicy, score

HERE = Path(__file__).resolve().parent
RUNS = 8
SHAPES = {"prompt": (1024, 1, 256), "turns": (512, 8, 256)}  # tokens of the prompt, turns, tokens a turn
GOALS = {("prompt", "separate"): 2.0, ("prompt", "merged"): 2.0, ("turns", "separate"): 3.0}
TOLERANCE = 1e-5  # of the gradient's norm


@dataclass(slots=True)
class Way:
    """Rows and whether the trainer may share their prefixes."""

    samples: list[Sample]
    share: bool


def make_ways(shape: str, groups: int, vocabulary: int, seed: int = 0) -> dict[str, Way]:
    """Rows of random tokens with advantages, as one row a turn and as one row a run."""
    prompt_length, turns, turn_length = SHAPES[shape]
    rng = np.random.default_rng(seed)
    rows: list[Sample] = []
    merged: list[Sample] = []
    for group in range(groups):
        prompt = rng.integers(5, vocabulary, prompt_length)
        for run in range(RUNS):
            tokens = np.concatenate([prompt, rng.integers(5, vocabulary, turns * turn_length)]).astype(np.int32)
            advantage = float(rng.normal())
            mask = np.arange(len(tokens)) >= prompt_length
            merged.append(_row(f"{group}-{run}", tokens, mask, advantage))
            for turn in range(turns):
                end = prompt_length + (turn + 1) * turn_length
                own = np.arange(end) >= end - turn_length
                rows.append(_row(f"{group}-{run}-{turn}", tokens[:end], own, advantage))
    return {"tree": Way(rows, True), "separate": Way(rows, False), "merged": Way(merged, False)}


def _row(name: str, tokens: np.ndarray, mask: np.ndarray, advantage: float) -> Sample:
    return Sample(name, tokens, mask, np.zeros(len(tokens), np.float32), advantage)


def give_behaviour(policy: PackedPolicy, ways: dict[str, Way], max_tokens: int) -> None:
    """Behaviour log-probs near the policy's own, the same for the same token in every way."""
    merged = ways["merged"].samples
    values = score(policy, merged, max_tokens_per_pack=max_tokens)
    noise = np.random.default_rng(1)
    by_run: dict[str, np.ndarray] = {}
    for sample, logp in zip(merged, values, strict=True):
        assert sample.rollout_logprobs is not None
        sample.rollout_logprobs[sample.loss_mask] = logp + noise.normal(0, 0.05, len(logp))
        by_run[sample.row_id] = sample.rollout_logprobs
    for sample in ways["tree"].samples:
        whole = by_run[sample.row_id.rpartition("-")[0]]
        sample.rollout_logprobs = np.where(sample.loss_mask, whole[: len(sample.token_ids)], 0).astype(np.float32)


class Trainer:
    """The trainer's own step on one model."""

    def __init__(self, folder: Path, ranks: Ranks, dtype: torch.dtype, max_tokens: int) -> None:
        self.policy = load_policy(folder, ranks, dtype)
        self.spec = OptimizerSpec(lr=1e-7)
        self.optimizer = build_optimizer(self.policy.model, self.spec)
        self.max_tokens = max_tokens

    def gradients(self, way: Way) -> dict[str, float]:
        """Forward and backward over a whole step's rows."""
        return accumulate_gradients(
            self.policy, way.samples, AlgorithmSpec(), max_tokens_per_pack=self.max_tokens, share_prefixes=way.share
        )

    def step(self, way: Way) -> dict[str, float]:
        """The training phase."""
        metrics = self.gradients(way)
        clip_gradients(self.policy.parameters(), self.spec.clip_grad)
        apply_step(self.optimizer, self.spec, 0)
        return metrics

    def gradient_of(self, way: Way) -> torch.Tensor:
        """The step's gradient as one float64 vector."""
        self.optimizer.zero_grad()
        self.gradients(way)
        grads = [p.grad for p in self.policy.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        vector = torch.cat([g.detach().double().flatten().cpu() for g in whole])
        self.optimizer.zero_grad()
        return vector


def differences(trainer: Trainer, ways: dict[str, Way]) -> dict[str, float]:
    """Distance of each way's gradient from that of separate rows, as a share of its norm."""
    reference = trainer.gradient_of(ways["separate"])
    names = [name for name in ways if name != "separate"]
    return {name: float((trainer.gradient_of(ways[name]) - reference).norm() / reference.norm()) for name in names}


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of ``work``, with what it left on the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(trainer: Trainer, ways: dict[str, Way], repeats: int, device: torch.device) -> dict[str, Any]:
    """Repeats of every way in turn, after one unmeasured step each."""
    facts: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        metrics = trainer.step(way)
        facts[name] = {key: int(metrics[key]) for key in ("rows", "tokens_unpacked", "tokens_computed", "packs")}
        if device.type == "cuda":
            facts[name]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        facts[name]["seconds"] = []
    for _ in range(repeats):
        for name, way in ways.items():
            facts[name]["seconds"].append(round(timed(lambda way=way: trainer.step(way), device), 4))
    for fact in facts.values():
        fact["median_s"] = median(fact["seconds"])
    return facts


def report(shape: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Speed-ups of the tree, with the goals."""
    tree = facts["tree"]["median_s"]
    speed_up = {name: round(facts[name]["median_s"] / tree, 2) for name in facts if name != "tree"}
    goals = {name: GOALS[shape, name] for name in speed_up if (shape, name) in GOALS}
    reached = {name: speed_up[name] >= goal for name, goal in goals.items()}
    return {"speed_up": speed_up, "goal": goals, "reached": reached, "ways": facts}


def models(given: argparse.Namespace) -> dict[str, tuple[Path, torch.dtype, bool]]:
    """Folder, format of the activations and whether time is taken, by name."""
    tiny = {size: build_model(given.work / f"tiny-{size}", size=size) for size in given.sizes}
    if given.device == "cpu":
        return {size: (folder, torch.float32, True) for size, folder in tiny.items()}
    big = build_shape_model(given.work / "shape-0.6b")
    return {size: (folder, torch.float32, False) for size, folder in tiny.items()} | {
        "0.6b": (big, torch.bfloat16, True)
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All models and shapes."""
    ranks = Ranks.join(given.device)
    results: dict[str, Any] = {}
    for size, (folder, dtype, take_time) in models(given).items():
        for shape in given.shapes:
            trainer = Trainer(folder, ranks, dtype, given.max_tokens)
            vocabulary = min(trainer.policy.causal.config.vocab_size, 500)
            result: dict[str, Any] = {}
            if dtype == torch.float32:
                ways = make_ways(shape, 1, vocabulary)
                give_behaviour(trainer.policy, ways, given.max_tokens)
                result["gradient_difference"] = differences(trainer, ways)
                assert max(result["gradient_difference"].values()) <= TOLERANCE, result
            if take_time:
                ways = make_ways(shape, given.groups, vocabulary)
                give_behaviour(trainer.policy, ways, given.max_tokens)
                result |= report(shape, measure(trainer, ways, given.repeats, ranks.device))
            results[f"{size} {shape}"] = result
            print(json.dumps({f"{size} {shape}": result}), flush=True)
            del trainer
            gc.collect()
    ranks.leave()
    return results


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="+", default=["1m", "10m"], choices=("1m", "10m"), help="tiny models")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--groups", type=int, default=1, help="groups of 8 runs an optimiser step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=20480, help="token budget of a pack")
    parser.add_argument("--work", type=Path, default=Path("prefix-tree-models"))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/prefix_tree_DEVICE.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    out = given.out or HERE / "results" / f"prefix_tree_{given.device}.json"
    before = describe(given.device)
    settings = {key: getattr(given, key) for key in ("groups", "repeats", "threads", "max_tokens")}
    result = {
        "what": "training phase (forward, backward, clipping, AdamW) by prefix tree, beside separate and merged rows",
        "machine": before,
        "settings": settings | {"runs_a_group": RUNS, "shapes": SHAPES, "tolerance": TOLERANCE},
        "results": run(given),
        "load_after": describe(given.device)["load_1_min"],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
