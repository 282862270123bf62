"""What the platform itself costs a round: seconds outside rollouts, judge, training and evaluation.

Drives the arithmetic recipe by the in-process driver, engine and trainer warm. Training counts with its checkpoint and
with the push to the engine; the trainer's part of the canary is not timed apart and so stands on the overhead's side.
What is left is Dagster (jobs, events, checks, metadata), the registry, reading and writing rows, planning and
everything between two jobs. One warm-up round is left out. Processor seconds are those of the driver, the engine and
the trainer in all rounds; they depend less on what else the machine does.

``--beside CHECKOUT`` measures another checkout in turns with this one.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

#: Assets whose own seconds are told apart; what a job takes beyond its assets is Dagster's.
ASSETS = ("policy_snapshot", "rollout_batches", "judged_experiences", "policy_checkpoint", "evaluation_report")


def run(work: Path, rounds: int) -> dict[str, Any]:
    """Drive a project of ``rounds`` rounds in ``work``; one split a round, and processor seconds a round.

    The warm start is kept in ``<work>.warm`` for the next call.
    """
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

    warm = work.with_name(f"{work.name}.warm")
    shutil.rmtree(work, ignore_errors=True)
    if warm.exists():
        shutil.copytree(warm, work)
    else:
        recipe_named("arithmetic").write(work / "arithmetic")
    config = load_config(work / "arithmetic" / "rft.yaml")
    config = config.model_copy(update={"buffer": config.buffer.model_copy(update={"total_steps": rounds})})
    write_text(home.config_file, dump_config(config))
    project = Project.open(home)

    def stop() -> None:
        connect_engine(project).shutdown()
        connect_trainer(project).shutdown()

    if not warm.exists():
        begun = drive(project, defs, max_launches=1)
        stop()
        if begun.failed:
            raise SystemExit(begun.failed)
        shutil.copytree(work, warm)
    try:
        engine, trainer = connect_engine(project), connect_trainer(project)
        cpu, started = spent(engine, trainer), time.perf_counter()
        result = drive(project, defs)
        whole = time.perf_counter() - started
        cpu = {name: (now - cpu[name]) / rounds for name, now in spent(engine, trainer).items()}
    finally:
        stop()
    if result.failed:
        raise SystemExit(result.failed)
    between = (whole - sum(done.wall_s for done in result.launched)) / rounds
    with open_instance(home) as instance:
        splits = [
            split(project, instance, [done for done in result.launched if done.round == number], between)
            for number in range(1, rounds + 1)
        ]
    return {"cpu_s": cpu, "rounds": splits}


def spent(engine: Any, trainer: Any) -> dict[str, float]:
    """Processor seconds of the processes so far."""
    return {
        "driver": time.process_time(),
        "engine": engine.status().cpu_seconds,
        "trainer": trainer.status()["cpu_seconds"],
    }


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


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run: seconds of overhead without the warm-up round, processor seconds a round."""
    overhead = [each["overhead_s"] for each in measured["rounds"][1:]]
    cpu = measured["cpu_s"]
    return {
        "overhead_s": {"median": median(overhead), "least": min(overhead), "most": max(overhead)},
        "cpu_s_a_round": {**cpu, "all": sum(cpu.values())},
    }


def in_turns(sides: dict[str, Path], work: Path, rounds: int, repeat: int) -> dict[str, list[dict[str, Any]]]:
    """Measure the checkouts ``repeat`` times in turns, each in a process of its own; the measurements by side."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, checkout in sides.items():
            out = work / f"{name}.json"
            command = [sys.executable, __file__, "--rounds", str(rounds), "--work", str(work / name), "--out", str(out)]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True)
            found[name].append(json.loads(out.read_text()))
    return found


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the least overhead, whose splits are kept, and the figures of all runs."""
    run = min(runs, key=lambda each: each["overhead_s"]["median"])
    cpu = {name: min(each["cpu_s_a_round"][name] for each in runs) for name in run["cpu_s_a_round"]}
    medians = [each["overhead_s"]["median"] for each in runs]
    return {"overhead_s": run["overhead_s"], "least_cpu_s_a_round": cpu, "medians": medians, "rounds": run["rounds"]}


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="the first of them is a warm-up")
    parser.add_argument("--work", type=Path, default=Path("round-overhead"))
    parser.add_argument("--beside", type=Path, help="another checkout, called `before` in the result")
    parser.add_argument("--repeat", type=int, default=3, help="with --beside: runs of each checkout")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "round_overhead.json")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: expected 2 or more, the first is a warm-up")
    report: dict[str, Any] = {
        "what": "seconds a round outside rollouts, judge, training with checkpoint and push, and evaluation",
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "settings": {"recipe": "arithmetic", "rounds": given.rounds, "load_1_min": round(os.getloadavg()[0], 1)},
    }
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if given.beside is None:
        measured = run(work, given.rounds)
        report |= {**summary(measured), "rounds": measured["rounds"]}
        print(json.dumps(summary(measured)))
    else:
        sides = {"before": given.beside.resolve(), "after": Path(__file__).resolve().parents[1]}
        report |= {name: best(runs) for name, runs in in_turns(sides, work, given.rounds, given.repeat).items()}
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
