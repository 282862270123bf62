"""A tool is learned: the calculator recipe by several seeds, from its noisy warm start to the end of its rounds.

Every seed is one ``rft run`` in a folder of its own, real processes and all. What counts is the share of held-out word
problems answered right (the tool called, its result repeated), sampled at temperature 1 and greedily. Finished seeds
are kept in ``--work``, so that what was ended goes on where it stopped.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe

from rft_platform.config.load import load_config
from rft_platform.recipes.calculator.demonstrations import WRONG_ANSWER, WRONG_OPERATION
from rft_platform.recipes.calculator.prepare import prepare

HERE = Path(__file__).resolve().parent
MOST_AT_START, LEAST_AT_END = 0.60, 0.85


def run_seed(seed: int, work: Path, python: str) -> dict[str, Any]:
    """One run of the recipe, or the result of an earlier one."""
    result = work / f"seed-{seed}.json"
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    recipe = prepare(work / f"recipe-{seed}")
    config, home = recipe.with_name("seeded.yaml"), work / f"home-{seed}"
    config.write_text(recipe.read_text().replace("seed: 1\n", f"seed: {seed}\n", 1))
    started, load = time.time(), os.getloadavg()[0]
    command = [python, "-m", "rft_platform", "run", "--config", str(config)]
    subprocess.run(command, env={**os.environ, "RFT_HOME": str(home)}, check=True)
    wall_s = time.time() - started
    found = {"seed": seed, "wall_s": round(wall_s, 1), "load_1_min": [round(load, 1), round(os.getloadavg()[0], 1)]}
    found |= measured(home)
    result.write_text(json.dumps(found, indent=1) + "\n")
    return found


def measured(home: Path) -> dict[str, Any]:
    """What the notes of a project say: held-out success by round, the rewards, and the warm start's length."""
    rounds = sorted(folder for folder in (home / "rounds").iterdir() if folder.name.startswith("r"))
    notes = {int(folder.name[1:]): note(folder, "evaluation")["metrics"] for folder in rounds}
    held_out = {
        number: {"sampled": metrics["sampled_pass"], "greedy": metrics["greedy_pass"]}
        for number, metrics in notes.items()
        if "sampled_pass" in metrics
    }
    first, last = held_out[min(held_out)], held_out[max(held_out)]
    return {
        "held_out_sampled": [first["sampled"], last["sampled"]],
        "held_out_greedy": [first["greedy"], last["greedy"]],
        "held_out_by_round": held_out,
        "warm_start_steps": note(home / "rounds" / "r0000", "warm_start")["steps"],
        "reached": first["sampled"] <= MOST_AT_START and last["sampled"] >= LEAST_AT_END,
    }


def note(folder: Path, name: str) -> dict[str, Any]:
    """A phase's note."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def settings(work: Path) -> dict[str, Any]:
    """What was run, in short."""
    config = load_config(prepare(work / "recipe"))
    return {
        "algorithm_type": config.algorithm.algorithm_type,
        "rounds": config.buffer.total_steps,
        "tasks_a_round": config.buffer.batch_size,
        "runs_a_task": config.algorithm.repeat_times,
        "lr": config.algorithm.optimizer.lr,
        "wrong_operation_share": {kind: share for kind, (share, _) in WRONG_OPERATION.items()},
        "wrong_answer_share": WRONG_ANSWER,
        "warm_start_stops_at": config.warm_start.stop_at if config.warm_start else None,
    }


def main() -> None:
    """Run the seeds that are not done yet, and write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=Path("calculator-work"), help="where runs are kept")
    parser.add_argument("--python", default=sys.executable, help="the platform's interpreter")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "calculator_learns.json")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    work, runs = given.work.resolve(), []
    for seed in given.seeds:
        runs.append(run_seed(seed, work, given.python))
        report = {"what": "recipes/calculator", "machine": describe(), "settings": settings(work), "runs": runs}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(runs[-1]), flush=True)


if __name__ == "__main__":
    main()
