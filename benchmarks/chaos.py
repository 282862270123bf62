"""Many seeded kills over every process of the platform, and whether the projects came through.

Three quarters of the kills strike projects that `rft run` drives (driver, engine, trainer), the others projects under
the daemon (daemon, webserver, code server, run worker, MLflow, engine, trainer). A project takes up to 40 kills, then
ends undisturbed, and is checked against one undisturbed run. Wants a quiet machine: a kill's recovery is measured.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run(kills: int, seed: int, targets: list[str], work: Path, side_by_side: bool, io_faults: int) -> dict[str, Any]:
    """Do the kills in ``work`` and return the report."""
    from rft_platform.chaos.records import summary
    from rft_platform.chaos.runs import run_chaos
    from rft_platform.chaos.schedule import check_targets
    from rft_platform.chaos.scratch import make_scratch
    from rft_platform.processes.signals import terminable

    began = time.perf_counter()
    with terminable():
        outcomes = run_chaos(
            make_scratch(work),
            kills,
            seed,
            check_targets(targets),
            lambda line: print(line, flush=True),
            side_by_side,
            io_faults,
        )
    return {
        "what": "seeded kills, then an undisturbed end and the invariants of docs/chaos.md",
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "seed": seed,
        "both_modes_at_once": side_by_side,
        "wall_s": round(time.perf_counter() - began, 1),
        **summary(outcomes),
    }


def main() -> None:
    """Run and write the result; exit code 1 where an invariant was violated."""
    from rft_platform.chaos.schedule import TARGETS

    every = list(dict.fromkeys(target for targets in TARGETS.values() for target in targets))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(every))
    parser.add_argument("--work", type=Path, help="kept afterwards; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "chaos.json")
    parser.add_argument("--side-by-side", action="store_true", help="both modes at once: sooner done, slower recovery")
    parser.add_argument("--io-faults", type=int, default=0, help="file system faults in driver and trainer besides")
    given = parser.parse_args()
    targets = given.targets.split(",")
    with tempfile.TemporaryDirectory(prefix="rft-chaos-") as temporary:
        report = run(
            given.kills, given.seed, targets, given.work or Path(temporary), given.side_by_side, given.io_faults
        )
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("kills", "wall_s", "by_target", "by_phase", "recovery_s")}))
    for violation in report["violations"]:
        print(f"violated: {violation['invariant']}: {violation['message']} (again: {violation['replay']})")
    if report["violations"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
