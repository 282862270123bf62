"""A recipe by several seeds: its figures before and after training, with intervals over the seeds, and one picture.

``python benchmarks/recipe_seeds.py math-agent --seeds 1 2 3 --work FOLDER [--picture FILE]`` runs ``rft recipe`` once
for each seed, in a separate home below the folder. Finished seeds are kept there, so an interrupted run continues.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from rft_platform.recipes.recipe import recipes
from rft_platform.recipes.report import RecipeReport, draw

HERE = Path(__file__).resolve().parent


def run_seed(recipe: str, seed: int, work: Path) -> dict[str, Any]:
    """The report of one seed, as JSON."""
    written = work / f"seed-{seed}.json"
    if not written.exists():
        rft = [sys.executable, "-m", "rft_platform"]
        environment = {**os.environ, "RFT_HOME": str(work / f"home-{seed}")}
        command = [*rft, "recipe", recipe, "--seed", str(seed), "--json", str(written)]
        subprocess.run(command, env=environment, check=True)
        subprocess.run([*rft, "stop"], env=environment, check=True)
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def over_seeds(values: list[float]) -> dict[str, Any]:
    """Mean and 95 % interval of the mean (Student's t over seeds); no interval for one seed."""
    mean, found = statistics.fmean(values), {"values": [round(value, 4) for value in values]}
    if len(values) < 2:
        return {"mean": round(mean, 4), **found}
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4), **found}


def main() -> None:
    """Run the seeds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=[each.name for each in recipes().values() if each.figures])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, required=True, help="where homes and reports are kept")
    parser.add_argument("--out", type=Path, help="default: results/recipe_NAME.json")
    parser.add_argument("--picture", type=Path, help="draw the curves of all seeds into this file")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    found = [run_seed(given.recipe, seed, given.work.resolve()) for seed in given.seeds]
    reports = [RecipeReport.from_json(each) for each in found]
    figures = {}
    for column, curve in enumerate(reports[0].curves):
        ends = [[value.mean for value in report.curves[column].ends] for report in reports]
        is_share = curve.figure.is_share or not all(each[0] for each in ends)
        relative = [each[-1] - each[0] if is_share else each[-1] / each[0] - 1 for each in ends]
        stages = zip(reports[0].ends, zip(*ends, strict=True), strict=True)
        figures[curve.figure.label] = {
            **{stage: over_seeds(list(values)) for stage, values in stages},
            "change": over_seeds(relative),
            "published": curve.figure.published,
        }
    kept = ("seed", "wall_s", "cpu_s", "machine", "curves")
    result = {
        "what": f"rft recipe {given.recipe}",
        "machine": found[0]["machine"],  # of the run: finished seeds may come from another machine
        "held_out_tasks": reports[0].held_out_tasks,
        "figures": figures,
        "runs": [{name: each[name] for name in kept} for each in found],
    }
    out = given.out or HERE / "results" / f"recipe_{given.recipe.replace('-', '_')}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    if given.picture is not None:
        given.picture.write_bytes(draw(reports))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
