"""The demo, measured: what it reaches, what it costs, and what a round costs beside its work. One run a seed.

Overhead is what a round's two Dagster runs take beyond rollout, judge, training (with checkpoint, weight update and
canary) and evaluation: orchestration, MLflow, reading configuration and rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent


def run_demo(seed: int, rounds: int | None) -> dict[str, Any]:
    """One demo in a folder of its own; returns what ``rft demo --json`` wrote, and each round's agreement."""
    with tempfile.TemporaryDirectory() as folder:
        result, home = Path(folder) / "demo.json", Path(folder) / "home"
        command = [sys.executable, "-m", "rft_platform", "demo", "--seed", str(seed), "--json", str(result)]
        command += ["--rounds", str(rounds)] if rounds else []
        subprocess.run(command, env={**os.environ, "RFT_HOME": str(home)}, check=True)
        notes = [json.loads(file.read_text()) for file in sorted(home.glob("rounds/r*/train-policy.json"))]
        canaries = [json.loads(file.read_text())["metrics"] for file in sorted(home.glob("rounds/r*/evaluation.json"))]
        return {
            **json.loads(result.read_text()),
            "engine_mismatch": [note["engine_mismatch"] for note in notes],
            "canary_delta": [note["canary_delta"] for note in canaries if "canary_delta" in note],
        }


def condense(demo: dict[str, Any]) -> dict[str, Any]:
    """The numbers worth keeping of one run; seconds are medians over the rounds."""
    parts = [line["seconds"] for line in demo["rounds"]]
    names = ("rollout", "judge", "train", "evaluation", "overhead")
    kept = ("seed", "held_out_n", "held_out_pass_before", "held_out_pass_after", "greedy_before", "greedy_after")
    return {
        **{name: demo[name] for name in (*kept, "wall_s", "cpu_s", "policy_version")},
        "rounds": len(demo["rounds"]),
        "sampled_by_round": [line["pass_rate_sampled"] for line in demo["rounds"]],
        "seconds_a_round": {name: median(part[name] for part in parts if name in part) for name in names},
        "mean_abs_delta_logprob_max": max(value for value in demo["engine_mismatch"] if value is not None),
        "canary_delta_max": max(demo["canary_delta"]),
    }


def main() -> None:
    """Run the seeds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "demo.json")
    given = parser.parse_args()
    demos = [run_demo(seed, given.rounds) for seed in given.seeds]
    report = {"what": "rft demo", "machine": demos[0]["machine"], "runs": [condense(demo) for demo in demos]}
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
