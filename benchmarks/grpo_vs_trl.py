"""Learning speed beside TRL: CPU-seconds until a sampled held-out pass rate, from the same checkpoint, in one run.

Both sides learn additions below 100 from the same warm-started 1M-parameter model and the same 9,500 tasks, and are
measured on the same 500 held-out ones at temperature 1. For every seed both run at the same time with one thread, each
bound to a core, or both to the same (``--cores 0 0``), so that two seeds can be measured at once. Counted are the
processor seconds of all processes of a side after its start-up, evaluation left out on both sides. Ours goes the whole
way: Dagster rounds by the in-process driver, Parquet, judge, trainer, checkpoint, registry and canary. A mark is
reached at the first of two evaluations in a row above it; a side is stopped when it has reached the last one.

Needs the peer's scripts and data (``RFT_TEST_DATA/peers``) and a Python with TRL (``--peer-python``).
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

MARKS = (0.7, 0.8)
PEER_LINE = re.compile(r"# grpo step (\d+) wall=([\d.]+) cpu=([\d.]+) pass=([\d.]+)")
HERE = Path(__file__).resolve().parent

#: Our side's settings; found by a few runs of the parts in one process (``in_process.py``) on seeds 21 and 22.
OURS = {
    "tasks": 256,
    "repeat_times": 8,
    "epochs": 3,
    "train_batch_size": 512,
    "rounds": 40,
    "lr": 5e-4,
    "betas": [0.9, 0.99],
    "warmup": 10,
}
#: TRL's settings: those its own tuning ended with.
THEIRS = "--threads 1 --lr 5e-4 --sched linear --prompts 64 --G 8 --micro 256 --steps 400 --eval_every 20 --max_s 1500"


def our_config(peers: Path, seed: int) -> dict[str, Any]:
    """Our project on the peer's checkpoint and data."""
    data, judge = peers / "arithmetic", {"judge": "exact_match"}
    optimizer = {
        "lr": OURS["lr"],
        "betas": OURS["betas"],
        "lr_scheduler_type": "linear",
        "lr_warmup_steps": OURS["warmup"],
    }
    return {
        "project": "beside-trl",
        "name": f"seed-{seed}",
        "seed": seed,
        "model": {"model_path": str(data / "warm1m"), "max_model_len": 64, "max_response_tokens": 6},
        "algorithm": {
            "algorithm_type": "grpo",
            "repeat_times": OURS["repeat_times"],
            "epochs": OURS["epochs"],
            "optimizer": optimizer,
        },
        "buffer": {
            "batch_size": OURS["tasks"],
            "train_batch_size": OURS["train_batch_size"],
            "total_steps": OURS["rounds"],
            "explorer_input": {
                "taskset": {"path": str(data / "train.jsonl"), **judge},
                "eval_tasksets": [{"path": str(data / "test.jsonl"), "name": "held-out", **judge}],
            },
        },
        "evaluation": {"greedy": False},
    }


def run_ours(folder: Path) -> list[list[float]]:
    """Drive the project in ``folder``; the curve holds [round, wall s, CPU s, sampled pass]. Run in its own process."""
    from rft_platform.common.files import write_text
    from rft_platform.config.home import Home
    from rft_platform.config.load import dump_config, load_config
    from rft_platform.definitions import defs
    from rft_platform.rounds.project.project import Project
    from rft_platform.rounds.project.record import read
    from rft_platform.rounds.setup.connections import connect_engine, connect_trainer
    from rft_platform.run.driver import drive

    home = Home(folder / "home")
    write_text(home.config_file, dump_config(load_config(folder / "rft.yaml")))
    project = Project.open(home)
    begun = drive(project, defs, max_launches=1)  # the starting policy: engine, trainer and registry are up after it
    if begun.failed:
        raise SystemExit(begun.failed)
    started, before = time.perf_counter(), _processor_seconds(home)
    start = read(project.store, 0).evaluated.metrics["sampled_pass"]
    curve, evaluation_cpu, evaluation_wall = [[0, 0.0, 0.0, start]], 0.0, 0.0
    while not (result := drive(project, defs, max_launches=2)).finished:
        if result.failed:
            raise SystemExit(result.failed)
        number = result.launched[-1].round
        metrics = read(project.store, number).evaluated.metrics
        evaluation_cpu += metrics["evaluation_cpu_s"]
        evaluation_wall += metrics["evaluation_s"]
        wall = time.perf_counter() - started - evaluation_wall
        cpu = _processor_seconds(home) - before - evaluation_cpu
        curve.append([number, round(wall, 1), round(cpu, 1), metrics["sampled_pass"]])
        print(
            f"# ours round {number} wall={wall:.1f} cpu={cpu:.1f} pass={metrics['sampled_pass']:.3f}", file=sys.stderr
        )
        if seconds_to(curve, max(MARKS)) is not None:
            break
    connect_engine(project).shutdown()
    connect_trainer(project).shutdown()
    return curve


def _processor_seconds(home: Any) -> float:
    """Processor seconds so far of this process, the engine and the trainer."""
    import psutil

    from rft_platform.cluster.local.leases import read_lease

    total = time.process_time()
    for name in ("engine", "trainer"):
        lease = read_lease(home.leases / f"{name}.json")
        if lease is not None:
            times = psutil.Process(lease.pid).cpu_times()
            total += times.user + times.system
    return total


def seconds_to(curve: list[list[float]], mark: float) -> float | None:
    """CPU seconds at the first of two evaluations in a row at or above ``mark``."""
    for here, after in pairwise(curve):
        if here[3] >= mark and after[3] >= mark:
            return here[2]
    return None


def run_pair(peers: Path, peer_python: str, work: Path, seed: int, cores: Sequence[int]) -> dict[str, Any]:
    """Both sides at once, each on a core of its own."""
    folder = work / f"seed-{seed}"
    (folder / "peer" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        (folder / "peer" / "data" / f"{split}.jsonl").write_bytes(
            (peers / "arithmetic" / f"{split}.jsonl").read_bytes()
        )
    (folder / "rft.yaml").write_text(yaml.safe_dump(our_config(peers, seed)))
    init = str(peers / "arithmetic" / "warm1m")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PEER_DIR": str(folder / "peer")}
    command = [peer_python, "grpo.py", "--init", init, "--seed", str(seed), *THEIRS.split()]
    theirs = _start(cores[0], command, peers, environment, stderr=subprocess.STDOUT)
    our_environment = {**environment, "RFT_HOME": str(folder / "home")}
    ours = _start(cores[1], [sys.executable, __file__, "--ours", str(folder)], HERE, our_environment)
    curves = {"trl": watch_peer(theirs), "ours": json.loads(ours.communicate()[0].splitlines()[-1])}
    reached = {side: {str(mark): seconds_to(curve, mark) for mark in MARKS} for side, curve in curves.items()}
    return {
        "seed": seed,
        "cpu_seconds_to": reached,
        "final_pass": {s: c[-1][3] for s, c in curves.items()},
        "curves": curves,
    }


def watch_peer(peer: subprocess.Popen[str]) -> list[list[float]]:
    """TRL's curve [step, wall s, CPU s, sampled pass], read from its progress lines, up to the last mark."""
    curve: list[list[float]] = []
    assert peer.stdout is not None
    for line in peer.stdout:
        found = PEER_LINE.match(line)
        if found:
            print(line, end="", file=sys.stderr)
            curve.append([float(value) for value in found.groups()])
            if seconds_to(curve, max(MARKS)) is not None:
                peer.terminate()
    peer.wait()
    return curve


def _start(
    core: int, command: list[str], folder: Path, environment: dict[str, str], stderr: int | None = None
) -> subprocess.Popen[str]:
    pinned = ["taskset", "--cpu-list", str(core), *command]
    return subprocess.Popen(pinned, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def main() -> None:
    """Run all seeds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(os.environ.get("RFT_TEST_DATA", "")) / "peers")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--work", type=Path, default=Path("beside-trl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="TRL's core and ours")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "grpo_vs_trl.json")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        print(json.dumps(run_ours(given.ours)))
        return
    runs = []
    for seed in given.seeds:
        runs.append(run_pair(given.peers.resolve(), given.peer_python, given.work.resolve(), seed, given.cores))
        given.out.write_text(json.dumps(_report(runs), indent=1) + "\n")
        print(json.dumps(runs[-1]["cpu_seconds_to"]), flush=True)


def _report(runs: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = {}
    for mark in map(str, MARKS):
        pairs = [(run["cpu_seconds_to"]["ours"][mark], run["cpu_seconds_to"]["trl"][mark]) for run in runs]
        both = [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        ratios[mark] = {"each": both, "median": median(both) if both else None}
    return {
        "what": "CPU-seconds to a sampled held-out pass rate, ours / TRL's; same checkpoint, data and run",
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "settings": {"ours": OURS, "trl": THEIRS, "threads": 1, "cores_a_side": 1},
        "ratio_ours_to_trl": ratios,
        "runs": runs,
    }


if __name__ == "__main__":
    main()
