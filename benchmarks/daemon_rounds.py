"""Rounds under the daemon, unattended: how long they take with sync_offset 0 and with 1, and what overlaps.

Starts ``rft ui --auto`` (webserver, daemon, MLflow server) on a fresh project of the tiny model for each offset and
touches nothing until the sensors have closed the last round. Start and end of every phase are those of Dagster's step
events. Batches are sized so that exploration and training take about as long; each works with one thread. A round's
overhead is its share of the wall time in which neither engine nor trainer work: ticks of the sensors, the run queue and
the start of a run's process.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PHASES = {"rollout_batches": "explore", "policy_checkpoint": "train", "evaluation_report": "evaluate"}
JUDGE = '''"""Rewards that differ even on an untrained model."""


def digit_share(task: dict, response: str) -> float:
    return sum(character.isdigit() for character in response) / max(len(response), 1)
'''
Span = tuple[float, float]


def make_project(work: Path, offset: int, rounds: int) -> Path:
    """A project folder with its configuration; returns its home."""
    from rft_platform.recipes.tiny_model import build_model

    work.mkdir(parents=True)
    (work / "share_judge.py").write_text(JUDGE)
    tasks, held_out = work / "tasks.jsonl", work / "held_out.jsonl"
    _write(tasks, [(a, b) for a in range(16) for b in range(16)])
    _write(held_out, [(a, 17) for a in range(8)])
    judge = {"judge": "share_judge:digit_share"}
    config = {
        "project": "overlap",
        "name": f"offset-{offset}",
        "seed": 7,
        "model": {"model_path": str(build_model(work / "model")), "max_model_len": 256, "max_response_tokens": 64},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "optimizer": {"lr": 1e-4}},
        "synchronizer": {"sync_offset": offset},
        "buffer": {
            "batch_size": 96,
            "train_batch_size": 64,
            "total_steps": rounds,
            "explorer_input": {
                "taskset": {"path": str(tasks), **judge},
                "eval_tasksets": [{"path": str(held_out), "name": "held-out", **judge}],
            },
        },
    }
    home = work / "home"
    home.mkdir()
    (home / "rft.yaml").write_text(json.dumps(config))  # JSON is YAML
    return home


def run(work: Path, offset: int, rounds: int, interval_s: int, deadline_s: float) -> dict[str, Any]:
    """Close the rounds unattended; returns the timeline and what it comes to."""
    from tests.support.ports import free_port

    home = make_project(work, offset, rounds)
    env = {
        **os.environ,
        "RFT_HOME": str(home),
        "PYTHONPATH": str(work),
        "OMP_NUM_THREADS": "1",
        "RFT_SENSOR_INTERVAL_S": str(interval_s),
    }
    command = [sys.executable, "-m", "rft_platform", "ui", "--auto"]
    ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())]
    with (work / "ui.log").open("w") as log:
        ui = subprocess.Popen([*command, *ports], env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        last, until = home / "rounds" / f"r{rounds:04d}" / "evaluation.json", time.monotonic() + deadline_s
        while not last.exists():
            if ui.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"offset {offset}: not finished in {deadline_s:.0f} s; see {work / 'ui.log'}")
            time.sleep(0.5)
        time.sleep(2 * interval_s)  # the last run's own end
    finally:
        ui.send_signal(signal.SIGINT)
        ui.wait(timeout=90)
        subprocess.run([sys.executable, "-m", "rft_platform", "stop"], env=env, check=False, capture_output=True)
    return {"sync_offset": offset, **summary(timeline(home, rounds), rounds)}


def timeline(home: Path, rounds: int) -> list[dict[str, Any]]:
    """Start and end of each round's phases, in seconds since the first exploration began."""
    from rft_platform.config.home import Home
    from rft_platform.jobs.instance import open_instance

    found: dict[tuple[str, str], Span] = {}
    with open_instance(Home(home)) as instance:
        for dagster_run in instance.get_runs():
            key = dagster_run.tags.get("dagster/partition")
            for step in instance.get_run_step_stats(dagster_run.run_id) if key else []:
                if step.step_key in PHASES and step.start_time and step.end_time:
                    found[key, PHASES[step.step_key]] = (step.start_time, step.end_time)
    begin = min(start for start, _ in found.values())
    return [
        {
            "round": number,
            **{
                phase: [round(moment - begin, 2) for moment in found[f"r{number:04d}", phase]]
                for phase in PHASES.values()
            },
        }
        for number in range(1, rounds + 1)
    ]


def summary(rows: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Wall time from the first exploration to the last evaluation, and how it was spent."""
    spans = {phase: [tuple(row[phase]) for row in rows] for phase in PHASES.values()}
    wall = max(end for _, end in spans["evaluate"])
    busy = union([span for phase in spans.values() for span in phase])
    overlap = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in spans["explore"] for b in spans["train"])
    return {
        "wall_s": round(wall, 2),
        "overlap_s": round(overlap, 2),
        "seconds_a_round": {
            phase: round(sum(end - start for start, end in each) / rounds, 2) for phase, each in spans.items()
        },
        "overhead_s_a_round": round((wall - busy) / rounds, 2),
        "timeline": rows,
    }


def union(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def draw(runs: list[dict[str, Any]], picture: Path) -> None:
    """The timelines, one below the other on one axis of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"explore": "#4c78a8", "train": "#f58518", "evaluate": "#54a24b"}
    figure, axes = pyplot.subplots(len(runs), 1, sharex=True, figsize=(10, 4.6), layout="constrained")
    for axis, each in zip(axes, runs, strict=True):
        for row in each["timeline"]:
            for lane, phase in enumerate(colours):
                start, end = row[phase]
                axis.barh(lane, end - start, left=start, color=colours[phase], edgecolor="white")
                axis.text((start + end) / 2, lane, row["round"], ha="center", va="center", color="white", fontsize=8)
        axis.set_yticks(range(len(colours)), list(colours))
        axis.invert_yaxis()
        axis.set_title(
            f"sync_offset {each['sync_offset']}: {len(each['timeline'])} rounds in {each['wall_s']:.0f} s, "
            f"exploration and training overlap for {each['overlap_s']:.0f} s",
            fontsize=10,
            loc="left",
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds since the first exploration began")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def _write(file: Path, pairs: list[tuple[int, int]]) -> None:
    file.write_text("".join(json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))


def main() -> None:
    """Run both offsets, write the result and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--offsets", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--interval", type=int, default=1, help="RFT_SENSOR_INTERVAL_S")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds for each offset")
    parser.add_argument("--work", type=Path, default=Path("daemon-rounds"), help="a folder; its content is replaced")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "daemon_rounds.json")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "images" / "overlap.png")
    given = parser.parse_args()
    work = given.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    runs = [
        run(work / f"offset-{offset}", offset, given.rounds, given.interval, given.deadline) for offset in given.offsets
    ]
    report = {
        "what": "rounds closed by sensors alone under the daemon; seconds",
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "settings": {"rounds": given.rounds, "sensor_interval_s": given.interval, "engine_threads": 1, "threads": 1},
        "saved_s": round(runs[0]["wall_s"] - runs[-1]["wall_s"], 2),
        "runs": runs,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    if len(runs) > 1:
        draw(runs, given.picture)
    shutil.rmtree(work)
    print(json.dumps([{name: each[name] for name in each if name != "timeline"} for each in runs]))


if __name__ == "__main__":
    main()
