"""A 10 million parameter model learns to add on a GPU: supervised warm start, then GRPO through Dagster's rounds.

``python benchmarks/learning_gpu.py --out FILE [--rounds 16] [--seeds 1 2 3]``. Tasks and held-out split are those of
``rft demo``, the model has ten times the size of its model; vLLM serves and the trainer runs on the GPU. Reports the
share of held-out additions that sampled answers solve, after the warm start and after each evaluated round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe

from rft_platform.common.files import read_json, write_json
from rft_platform.recipes.recipe import recipe_named
from rft_platform.recipes.tiny_model import build_model

RATE = ("sampled_pass", "sampled_pass_low", "sampled_pass_high")  # and its 95 % interval


def write_project(work: Path, seed: int, rounds: int, size: str, engine: str, *, compiled: bool = True) -> Path:
    """The demo's project with a model of another size; not ``compiled``: starts within seconds."""
    folder = work / "project"
    recipe_named("arithmetic").write(folder)
    build_model(folder / "model10", size=size)
    content: dict[str, Any] = yaml.safe_load((folder / "rft.yaml").read_text())
    content["seed"] = seed
    content["model"]["model_path"] = "model10"
    content["algorithm"]["optimizer"]["lr"] = 2e-4
    content["buffer"]["total_steps"] = rounds
    content["warm_start"]["optimizer"]["lr"] = 1e-3
    content["engine"] = {"kind": engine}
    content["explorer"] = {"runner_per_model": 512}
    if engine == "vllm":
        content["explorer"]["rollout_model"] = {
            "gpu_memory_utilization": 0.1,
            "dtype": "bfloat16",
            "enforce_eager": not compiled,
        }
        content["trainer"] = {"max_token_len_per_gpu": 65536, "torch_compile": compiled}
    written = folder / "learning.yaml"
    written.write_text(yaml.safe_dump(content))
    return written


def learn(work: Path, config: Path) -> dict[str, Any]:
    """Run the project; the held-out pass rate after each evaluated round."""
    home = work / "home"
    environment = {**os.environ, "RFT_HOME": str(home)}
    rft = [sys.executable, "-m", "rft_platform"]
    started = time.perf_counter()
    try:
        subprocess.run([*rft, "run", "--config", str(config)], cwd=work, env=environment, check=True)
    finally:
        subprocess.run([*rft, "stop"], env=environment, check=False)
    wall_s = time.perf_counter() - started
    shown = subprocess.run([*rft, "rounds", "--json"], env=environment, check=True, capture_output=True, text=True)
    curve = {
        entry["round"]: read_json(home / "rounds" / f"r{entry['round']:04d}" / "evaluation.json")["metrics"]
        for entry in json.loads(shown.stdout)["rounds"]
        if entry["pass_rate_sampled"] is not None
    }
    trainings = [read_json(file) for file in sorted((home / "rounds").glob("r*/train-policy.json"))]
    before, after = curve[min(curve)], curve[max(curve)]
    return {
        "wall_s": round(wall_s, 1),
        "before": [before[name] for name in RATE],
        "after": [after[name] for name in RATE],
        "gain": round(after[RATE[0]] - before[RATE[0]], 4),
        "curve": {number: metrics[RATE[0]] for number, metrics in curve.items()},
        "engine_mismatch": [training["engine_mismatch"] for training in trainings],  # nats, after each push of weights
        "mismatch_k3": [training["metrics"].get("mismatch_k3") for training in trainings],
    }


def draw(seeds: dict[str, Any], picture: Path) -> None:
    """The curves of all seeds, round 0 is the warm start."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), dpi=120)
    for seed, found in seeds.items():
        curve = sorted((int(number), 100 * rate) for number, rate in found["curve"].items())
        axes.plot(*zip(*curve, strict=True), marker="o", label=f"seed {seed}")
    axes.set(xlabel="GRPO round", ylabel="held-out additions solved, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    """Run each seed, and write the file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--rounds", type=int, default=16)
    options.add_argument("--seeds", type=int, nargs="+", default=[1])
    options.add_argument("--size", default="10m")
    options.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    options.add_argument("--picture", type=Path, help="draw the curves into this file")
    given = options.parse_args()
    result: dict[str, Any] = {
        "machine": describe("cuda" if given.engine == "vllm" else "cpu"),
        "settings": {"size": given.size, "rounds": given.rounds},
        "seeds": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        for seed in given.seeds:
            work = Path(temporary) / f"seed{seed}"
            work.mkdir()
            config = write_project(work, seed, given.rounds, given.size, given.engine)
            result["seeds"][seed] = learn(work, config)
            print(seed, result["seeds"][seed], flush=True)
            write_json(given.out, result)
            if given.picture is not None:
                draw(result["seeds"], given.picture)


if __name__ == "__main__":
    main()
