"""2,000 concurrent agent runs on one, two and three raylets, while attempts fail: throughput, and every group complete.

``PYTHONPATH=. .venv-ray/bin/python benchmarks/ray_scaling.py`` (``make test-ray`` makes the environment). All raylets
are on this machine. The agents wait for a tool; with ``--compute`` they use the processor for the same time, which
needs a machine with more cores than the raylets declare. Each agent reserves one of the processors that its raylet
declares. The engine is a stub, because its throughput is not measured.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from rft_platform.cluster.ray.ray_cluster import RayCluster  # noqa: E402
from rft_platform.common.files import write_json  # noqa: E402
from rft_platform.config.rollout_limits import RolloutLimits  # noqa: E402
from rft_platform.inference.interface import SamplingParams  # noqa: E402
from rft_platform.rollout.runner.run_rollouts import run_rollouts  # noqa: E402
from rft_platform.rollout.workflow import WorkerWorkflow  # noqa: E402
from rft_platform.tasks.task import Task  # noqa: E402
from tests.rollout.fake_engine import FakeEngine  # noqa: E402
from tests.support.raylets import NODE, raylets  # noqa: E402

NODES, RUNS, REPEAT = 3, 2000, 4
FAILING, KILLED = 0.05, 0.01  # shares of the attempts; the second is part of the first
LIMIT = 0.15
FIRST, LAST = 0.1, 0.9  # the throughput is that between these shares of the runs: workers start before and end after
OUT = Path(__file__).parent / "results" / "ray_scaling.json"


def measure(nodes: int, runs: int, tool_s: float, computes: bool, work: Path) -> dict[str, Any]:
    """Roll out ``runs`` runs, all of them open at once, on ``nodes`` raylets."""
    slots = nodes * NODE["num_cpus"]
    faults = {"tool_s": tool_s, "computes": computes, "failing": FAILING, "killed": KILLED}
    tasks = [
        Task(f"task-{number}", "tasks", f"question {number}", None, {"question": f"question {number}", **faults})
        for number in range(runs // REPEAT)
    ]
    engine, done_at = FakeEngine(), list[float]()
    engine.serve()
    try:
        with raylets(nodes) as running:
            cluster = RayCluster(work / "leases", work / "logs", running.address)
            workflow = WorkerWorkflow("waiting_agent:answer", count=slots, log_folder=work / "logs", cluster=cluster)
            began, load = time.monotonic(), os.getloadavg()[0]
            batch = run_rollouts(
                engine, tasks, workflow, round=1, batch=0, repeat_times=REPEAT, sampling=SamplingParams(max_tokens=64),
                limits=RolloutLimits(concurrency=runs, max_retries=5),
                on_progress=lambda done, total: done_at.append(time.monotonic()),
            )  # fmt: skip
            wall_s = time.monotonic() - began
    finally:
        engine.shutdown()
    groups = Counter(row.group_id for row in batch.rows)
    return {
        "raylets": nodes,
        "runs": runs,
        "at_once": slots,
        "wall_s": round(wall_s, 1),
        "runs_per_s": round((LAST - FIRST) * runs / (done_at[int(LAST * runs)] - done_at[int(FIRST * runs)]), 2),
        "runs_per_s_with_starts": round(len(batch.rows) / wall_s, 2),
        "runs_per_s_without_faults": round(slots / tool_s, 2),
        "failed_attempts": sum(batch.report.errors.values()),
        "errors": dict(batch.report.errors),
        "runs_given_up": batch.report.failed,
        "groups": len(groups),
        "complete_groups": sum(count == REPEAT for count in groups.values()),
        "run_ids_twice": len(batch.rows) - len({row.run_id for row in batch.rows}),
        "load_at_start": round(load, 1),
    }


def main(runs: int, tool_s: float, computes: bool, work: Path, out: Path) -> None:
    """Measure one, two and three raylets with a proportional number of runs, and compare the throughputs."""
    measured = []
    for nodes in range(1, NODES + 1):
        share = runs * nodes // NODES // REPEAT * REPEAT
        measured.append(measure(nodes, share, tool_s, computes, work / str(nodes)))
        print(measured[-1], flush=True)
    one, tool = measured[0]["runs_per_s"], "compute" if computes else "wait for a tool and do not compute"
    write_json(
        out,
        {
            "what": "agent runs in workers on raylets of one machine, while 5 % of the attempts fail, a fifth of them "
            f"because their process is killed (benchmarks/ray_scaling.py). The agents {tool}, each reserves one of the "
            "processors that its raylet declares, and the engine is a stub",
            "machine": {"cpus": os.cpu_count(), "raylets": NODES, "declared_cpus_of_each": NODE["num_cpus"]},
            "tool_s": tool_s,
            "limit": LIMIT,
            "measured": measured,
            "of_linear": [round(each["runs_per_s"] / (one * each["raylets"]), 3) for each in measured],
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--tool-s", type=float, default=1.0)
    parser.add_argument("--compute", action="store_true", help="use the processor for --tool-s instead of waiting")
    parser.add_argument("--work", type=Path, required=True, help="empty folder for logs")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    main(given.runs, given.tool_s, given.compute, given.work, given.out)
