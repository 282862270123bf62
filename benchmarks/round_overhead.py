"""What the platform itself costs a round: seconds outside rollouts, judge, training and evaluation.

Drives the arithmetic recipe by the in-process driver, engine and trainer warm. Training counts with its checkpoint and
with the push to the engine; the trainer's part of the canary is not timed apart and so stands on the overhead's side.
What is left is Dagster (jobs, events, checks, metadata), the registry, reading and writing rows, planning and
everything between two jobs. One warm-up round is left out.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

#: Assets whose own seconds are told apart; what a job takes beyond its assets is Dagster's.
ASSETS = ("policy_snapshot", "rollout_batches", "judged_experiences", "policy_checkpoint", "evaluation_report")


def run(work: Path, rounds: int) -> list[dict[str, Any]]:
    """Drive a fresh project of ``rounds`` rounds in ``work``; one split a round, in seconds."""
    from rft_platform.common.files import write_text
    from rft_platform.config.home import Home
    from rft_platform.config.load import dump_config, load_config
    from rft_platform.recipes.recipe import recipe_named

    home = Home(work / "home")
    os.environ["RFT_HOME"] = str(home.root)  # before the definitions are imported: they read it
    from rft_platform.definitions import defs
    from rft_platform.jobs.instance import open_instance
    from rft_platform.rounds.project.project import Project
    from rft_platform.rounds.setup.connections import connect_engine, connect_trainer
    from rft_platform.run.driver import drive

    recipe_named("arithmetic").write(work / "arithmetic")
    config = load_config(work / "arithmetic" / "rft.yaml")
    config = config.model_copy(update={"buffer": config.buffer.model_copy(update={"total_steps": rounds})})
    write_text(home.config_file, dump_config(config))
    project = Project.open(home)
    begun = drive(project, defs, max_launches=1)  # the warm start: engine, trainer and registry are up after it
    if begun.failed:
        raise SystemExit(begun.failed)
    try:
        started = time.perf_counter()
        result = drive(project, defs)
        whole = time.perf_counter() - started
    finally:
        connect_engine(project).shutdown()
        connect_trainer(project).shutdown()
    if result.failed:
        raise SystemExit(result.failed)
    between = (whole - sum(done.wall_s for done in result.launched)) / rounds
    with open_instance(home) as instance:
        return [
            split(project, instance, [done for done in result.launched if done.round == number], between)
            for number in range(1, rounds + 1)
        ]


def split(project: Any, instance: Any, launched: list[Any], between: float) -> dict[str, Any]:
    """Where the seconds of one round went; ``between`` is the driver's own share outside its jobs."""
    number = launched[0].round
    from rft_platform.rounds.project.record import read

    record = read(project.store, number)
    explored, judged, trained, evaluated = record.explored, record.judged, record.trained(), record.evaluated
    work = {
        "rollouts": explored.seconds,
        "judge": judged.seconds,
        "training": sum(trained.seconds.values()),
        "push": evaluated.metrics["deploy_s"],
        "evaluation": evaluated.metrics["evaluation_s"],
    }
    steps = {
        step.step_key: step.end_time - step.start_time
        for done in launched
        for step in instance.get_run_step_stats(done.run_id)
        if step.start_time and step.end_time
    }
    wall = sum(done.wall_s for done in launched) + between
    return {
        "round": number,
        "wall_s": wall,
        "overhead_s": wall - sum(work.values()),
        "work_s": work,
        "assets_s": {name: steps[name] for name in ASSETS if name in steps},
        "outside_assets_s": wall - between - sum(steps.values()),
        "between_jobs_s": between,
        "optimizer_steps": trained.steps,
        "rows": explored.rows,
    }


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="the first of them is a warm-up")
    parser.add_argument("--work", type=Path, default=Path("round-overhead"))
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "round_overhead.json")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: expected 2 or more, the first is a warm-up")
    rounds = run(given.work.resolve(), given.rounds)
    overhead = [each["overhead_s"] for each in rounds[1:]]
    report = {
        "what": "seconds a round outside rollouts, judge, training with checkpoint and push, and evaluation",
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "overhead_s": {"median": median(overhead), "least": min(overhead), "most": max(overhead)},
        "rounds": rounds,
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["overhead_s"]))


if __name__ == "__main__":
    main()
