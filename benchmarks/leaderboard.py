"""Algorithms compared: the math agent learns with each from the same warm start, and the figures at equal tokens.

``python benchmarks/leaderboard.py --work FOLDER [--seeds 1 2 3] [--rounds 8] [--out FILE] [--picture FILE]``

The agent is warm-started once; every algorithm and seed continues from this checkpoint with the same tasks, runs a task
and optimizer, and its preset's own arguments. The seed sets the order of the tasks and all sampling. Progress counts in
sampled tokens, all explored runs included: the table compares the figures where the shortest of all runs ended, on
straight lines between evaluations. Finished runs are kept in the folder, so an interrupted comparison continues.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe
from recipe_seeds import over_seeds

from rft_platform.common.files import write_json, write_text
from rft_platform.recipes.recipe import recipe_named

HERE = Path(__file__).resolve().parent
RECIPE = "math-agent"

#: Section ``algorithm`` of each contestant. Advantages of whole runs are those of ``step_wise_grpo``, because a run has
#: several rows. The critic's learning rate and value clip suit a model of a million parameters and rewards up to 3.5.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "GRPO": {"algorithm_type": "multi_step_grpo"},
    "GSPO": {"algorithm_type": "gspo", "advantage_fn": "step_wise_grpo"},
    "DAPO": {"algorithm_type": "dapo", "advantage_fn": "step_wise_grpo"},
    "PPO": {"algorithm_type": "ppo", "critic": {"lr": 1.0e-3, "value_clip": 1.0, "warmup_steps": 5}},
    "REINFORCE++": {"algorithm_type": "reinforce++"},
    "RLOO": {"algorithm_type": "rloo"},
}


def rft(home: Path, *arguments: str) -> None:
    """Run a command of the platform for the home; its output stands in a file beside the home."""
    environment = {**os.environ, "RFT_HOME": str(home)}
    with home.with_suffix(".log").open("a") as log:
        command = [sys.executable, "-m", "rft_platform", *arguments]
        subprocess.run(command, env=environment, check=True, stdout=log, stderr=log)


def warm_started(work: Path) -> tuple[Path, Path]:
    """The recipe's project, and the last checkpoint of its warm start."""
    project, home = work / "project", work / "warm"
    if not project.exists():
        recipe_named(RECIPE).write(project)
    if not (home / "rounds" / "r0000" / "warm_start.json").exists():  # written when the warm start is complete
        content = yaml.safe_load((project / "rft.yaml").read_text())
        content["buffer"]["total_steps"] = 1
        write_text(project / "warm.yaml", yaml.safe_dump(content))
        rft(home, "run", "--config", str(project / "warm.yaml"))
    steps = home.glob(f"checkpoints/{RECIPE}/word-problems/warm_start/global_step_*")
    return project, max(steps, key=lambda folder: int(folder.name.rpartition("_")[2]))


def run(work: Path, name: str, seed: int, rounds: int) -> dict[str, Any]:
    """Train with one algorithm from the warm start; its curve, tokens and processor seconds."""
    label = f"{name.lower().replace('+', 'p')}-{seed}"
    written = work / f"{label}.json"
    if not written.exists():
        project, start = warm_started(work)
        content = yaml.safe_load((project / "rft.yaml").read_text()) | {"seed": seed, "name": label}
        del content["warm_start"]
        content["model"]["model_path"] = str(start)
        content["algorithm"] = ALGORITHMS[name] | {
            "repeat_times": content["algorithm"]["repeat_times"],
            "optimizer": content["algorithm"]["optimizer"],
        }
        content["buffer"]["total_steps"] = rounds
        write_text(project / f"{label}.yaml", yaml.safe_dump(content))
        rft(work / label, "run", "--config", str(project / f"{label}.yaml"))
        write_json(written, measured(work / label) | {"algorithm": name, "seed": seed, "machine": describe()})
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def measured(home: Path) -> dict[str, Any]:
    """Figures after each evaluation with the tokens sampled until then, and what the run cost."""
    import duckdb

    from rft_platform.config.home import Home
    from rft_platform.online.project import open_project
    from rft_platform.recipes.report import report_of
    from rft_platform.run.run_cost import drive_costs

    project = open_project(Home(home))
    report = report_of(project, recipe_named(RECIPE))
    assert report is not None, home
    files = str(home / "rounds" / "*" / "rollouts" / "*.parquet")
    query = (
        "select round, sum(len(response_ids)), count(distinct run_id) "
        "from read_parquet(?, hive_partitioning = false) group by round"
    )
    rows = {number: (int(tokens), runs) for number, tokens, runs in duckdb.sql(query, params=[files]).fetchall()}
    costs = drive_costs(project.home)
    sampled = np.cumsum([0] + [rows[number][0] for number in sorted(rows)]).tolist()
    return {
        "tokens": sampled,  # before the first round, and after each
        "runs": [rows[number][1] for number in sorted(rows)],
        "curves": {
            curve.figure.label: [(value.round, value.mean) for value in curve.values] for curve in report.curves
        },
        "cpu_s": sum(cost.cpu_s for cost in costs),
        "wall_s": sum(cost.wall_s for cost in costs),
    }


def at(found: Mapping[str, Any], label: str, tokens: float) -> float:
    """A figure after so many sampled tokens, on the straight line between two evaluations."""
    rounds, values = zip(*found["curves"][label], strict=True)
    return float(np.interp(tokens, [found["tokens"][number] for number in rounds], values))


def table(runs: Sequence[Mapping[str, Any]], budget: float) -> dict[str, Any]:
    """For each algorithm and figure: before, and after ``budget`` tokens, with intervals over seeds."""
    found: dict[str, Any] = {}
    for name in ALGORITHMS:
        own = [each for each in runs if each["algorithm"] == name]
        if not own:
            continue
        found[name] = {
            label: {
                "before": over_seeds([each["curves"][label][0][1] for each in own]),
                "after": over_seeds([at(each, label, budget) for each in own]),
            }
            for label in own[0]["curves"]
        } | {"cpu_s": round(statistics.median(each["cpu_s"] for each in own), 1)}
    return found


def draw(runs: Sequence[Mapping[str, Any]], budget: float, file: Path) -> None:
    """Draw the share of correct answers against sampled tokens: mean and range over the seeds of each algorithm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8, 4.5), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.add_subplot()
    grid = np.linspace(0, budget, 25)
    for name in ALGORITHMS:
        own = [each for each in runs if each["algorithm"] == name]
        if own:
            values = 100 * np.array([[at(each, "correct answers", tokens) for tokens in grid] for each in own])
            (line,) = axes.plot(grid / 1000, values.mean(0), label=name)
            axes.fill_between(grid / 1000, values.min(0), values.max(0), alpha=0.1, color=line.get_color())
    axes.set_xlabel("sampled tokens, thousands")
    axes.set_ylabel("correct answers, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    drawing.savefig(file)


def main() -> None:
    """Train what is missing and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where projects, homes and finished runs are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "leaderboard.json")
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    runs = [run(work, name, seed, given.rounds) for seed in given.seeds for name in given.algorithms]
    budget = min(each["tokens"][-1] for each in runs)
    result = {
        "what": f"the recipe {RECIPE} with each algorithm, from the same warm start",
        "settings": {"rounds": given.rounds, "tokens_compared": budget, "algorithms": ALGORITHMS},
        "figures": table(runs, budget),
        "runs": runs,
    }
    write_json(given.out, result)
    if given.picture is not None:
        draw(runs, budget, given.picture)
    print(json.dumps(result["figures"], indent=1))


if __name__ == "__main__":
    main()
