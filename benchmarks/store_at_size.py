"""What the store's questions cost when a project has grown: by default 1,000 rounds of 10,000 rows.

Makes such a project (see ``store_project``), asks every question in a process of its own, and writes medians and peak
memory to ``results/store_at_size.json``. Commands are timed whole, from their start to their end. The project is
deleted afterwards unless ``--keep``; with ``--home`` one that was kept is used again.

    python benchmarks/store_at_size.py --work /tmp/store_at_size

With ``--object-store`` the project's durable copy is on an S3 server, and ``results/store_at_size_s3.json`` gets the
times, requests and bytes of sensor ticks and traces (``store_on_s3``; in the environment of ``make test-s3``).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

RESULT_S3 = Path(__file__).parent / "results" / "store_at_size_s3.json"
RESULT = Path(__file__).parent / "results" / "store_at_size.json"
#: What is demanded of the answers, in seconds; of every question besides: a peak below ``MAX_RSS_MB``.
LIMITS_S = {
    "sensor tick, warm": 0.1,
    "sensor tick, first of a process": 0.1,
    "append 10,000 rows": 1.0,
    "rft trace ROW_ID": 2.0,
    "rft trace RUN_ID": 2.0,
    "rft trace models:/NAME@champion": 2.0,
    "rft trace ROUND": 2.0,
    "rft view: overview": 1.0,
    "rft view: first page": 1.0,
    "rft view: text in 50 rounds": 3.0,
    "rft view: highest reward in 50 rounds": 3.0,
}
MAX_RSS_MB = 1000.0
_REPEATS = 5

Seconds = tuple[float, float]  # wall, processor


# --- questions, each asked in a process of its own that prints the seconds of every repetition


def ask_tick(home: Path, cold: bool) -> list[Seconds]:
    """Ticks of the sensor that starts trainings, on the instance with all the project's run records."""
    import dagster as dg

    from rft_platform.config.home import Home
    from rft_platform.jobs.instance import open_instance
    from rft_platform.jobs.jobs import asset_jobs
    from rft_platform.jobs.sensors import experience_threshold_sensor
    from rft_platform.resources.names import PLAIN_NAMES
    from rft_platform.resources.project import ProjectResource

    resource, names = ProjectResource(home=str(home)), PLAIN_NAMES
    sensor = experience_threshold_sensor(names, asset_jobs(names)["sync_round_job"])
    with open_instance(Home(home)) as instance:
        instance.get_runs_count()  # the daemon has its instance open

        def tick() -> None:
            context = dg.build_sensor_context(instance=instance, resources={"project": resource})
            answer = sensor(context)
            assert isinstance(answer, dg.SensorResult), answer  # the newest round is explored and waits for training
            assert answer.run_requests, answer

        return timed(tick, 1) if cold else timed(tick, 21)[1:]


def ask_append(home: Path) -> list[Seconds]:
    """Store the rows of an explore batch: from records to a file in the ledger."""
    import numpy as np
    from store_project import Size, of_round, template

    from rft_platform.experience.schema import table_to_rows
    from rft_platform.experience.store import ExperienceStore

    store, random = ExperienceStore(home / "rounds"), np.random.default_rng(1)
    number = store.rounds()[-1] + 1
    rows = table_to_rows(of_round(template(random, Size().rows), random, number, 1)[0])
    seconds = timed(lambda: store.write_rollouts(number, 0, rows), _REPEATS)
    shutil.rmtree(store.round_folder(number))
    return seconds


def ask_training_read(home: Path) -> list[Seconds]:
    """Read a round as the trainer does: digest, match rows with judgements, make samples."""
    from rft_platform.experience.store import ExperienceStore
    from rft_platform.training.data.rollout_rows import read_rollouts

    store = ExperienceStore(home / "rounds")
    number = store.rounds()[len(store.rounds()) // 2]
    files = ([str(path) for path in store.rollout_files(number)], [str(store.judged_file(number))])
    return timed(lambda: read_rollouts(*files, policy_gradient=True), _REPEATS)


def ask_query(home: Path, name: str) -> list[Seconds]:
    """A DuckDB question over all rounds, with making the views."""
    from rft_platform.config.home import Home
    from rft_platform.experience import queries
    from rft_platform.experience.store import ExperienceStore
    from rft_platform.rounds.project.project import Project

    store, checkpoints = ExperienceStore(home / "rounds"), Project.open(Home(home)).checkpoints
    number = store.rounds()[len(store.rounds()) // 2]

    def ask() -> None:
        with queries.connect(store, checkpoints) as connection:
            answer: Any = {
                "mean_reward_by_round": lambda: queries.mean_reward_by_round(connection),
                "rows_that_trained": lambda: queries.rows_that_trained(connection, number),
                "count": lambda: connection.execute("SELECT count(*) FROM rollouts").fetchall(),
            }[name]()
            assert answer

    return timed(ask, 3)


def ask_transcripts(home: Path) -> list[Seconds]:
    """Transcripts of one round."""
    from rft_platform.experience.store import ExperienceStore
    from rft_platform.experience.transcripts import rollout_transcripts

    store = ExperienceStore(home / "rounds")
    number = store.rounds()[len(store.rounds()) // 2]

    def ask() -> None:
        assert rollout_transcripts(store, number, 6)

    return timed(ask, _REPEATS)


def ask_view(home: Path, search: dict[str, Any]) -> list[Seconds]:
    """A page of `rft view`: a search over its rounds, by default over the newest one."""
    from rft_platform.experience.store import ExperienceStore
    from rft_platform.servers.viewer.queries import Search, find_runs, newest

    store = ExperienceStore(home / "rounds")
    rounds = newest(store)
    given = {"first": rounds[0], "last": rounds[-1], **search} if search else {}
    return timed(lambda: find_runs(store, Search(**given)), _REPEATS)


def ask_overview(home: Path) -> list[Seconds]:
    """The overview of `rft view`; the first repetition reads the records of the rounds, the others find them kept."""
    import pandas  # noqa: F401 (the server has imported it before the first request)

    from rft_platform.config.home import Home
    from rft_platform.servers.viewer.app import overview_page

    return timed(lambda: overview_page(Home(home), "localhost"), _REPEATS)


QUESTIONS: dict[str, Callable[[Path], list[Seconds]]] = {
    "sensor tick, first of a process": lambda home: ask_tick(home, cold=True),
    "sensor tick, warm": lambda home: ask_tick(home, cold=False),
    "append 10,000 rows": ask_append,
    "training read of a round": ask_training_read,
    "mean_reward_by_round": lambda home: ask_query(home, "mean_reward_by_round"),
    "rows_that_trained": lambda home: ask_query(home, "rows_that_trained"),
    "rollout_transcripts": ask_transcripts,
    "count of all rows": lambda home: ask_query(home, "count"),
    "rft view: overview": ask_overview,
    "rft view: first page": lambda home: ask_view(home, {}),
    "rft view: text in 50 rounds": lambda home: ask_view(home, {"text": "no such text"}),
    "rft view: highest reward in 50 rounds": lambda home: ask_view(home, {"order": "-reward"}),
}


def timed(work: Callable[[], Any], times: int) -> list[Seconds]:
    """Wall and processor seconds of each of ``times`` calls."""
    seconds = []
    for _ in range(times):
        started, cpu = time.perf_counter(), time.process_time()
        work()
        seconds.append((time.perf_counter() - started, time.process_time() - cpu))
    return seconds


# --- the whole


def measure(command: list[str], home: Path, repeats: int = 1) -> dict[str, Any]:
    """Wall and processor seconds of a command, its peak memory in MB, and what it printed the last time."""
    seconds, peaks, outputs = [], [], list[str]()
    for _ in range(repeats):
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "RFT_HOME": str(home)}, cwd=home
        )
        assert process.stdout is not None
        outputs.append(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        seconds.append((time.perf_counter() - started, usage.ru_utime + usage.ru_stime))
        peaks.append(usage.ru_maxrss / 1024)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}\n{outputs[-1]}")
    return {"seconds": seconds, "peak_rss_mb": round(max(peaks), 1), "output": outputs[-1], "outputs": outputs}


def ask_all(home: Path) -> dict[str, dict[str, Any]]:
    """Every question and every command: median seconds, slowest, repetitions, peak memory."""
    found = {}
    for name in QUESTIONS:
        asked = [sys.executable, str(Path(__file__).absolute()), "--ask", name, "--home", str(home)]
        first = name == "sensor tick, first of a process"
        answers = [measure(asked, home) for _ in range(_REPEATS if first else 1)]
        seconds = [tuple(pair) for answer in answers for pair in json.loads(answer["output"].splitlines()[-1])]
        found[name] = summary(seconds, max(answer["peak_rss_mb"] for answer in answers))
        say(name, found[name])
    for name, arguments in commands(home).items():
        answer = measure([str(Path(sys.executable).parent / "rft"), *arguments], home, repeats=_REPEATS)
        found[name] = summary(answer["seconds"], answer["peak_rss_mb"])
        say(name, found[name])
    return found


def commands(home: Path) -> dict[str, list[str]]:
    """The commands that are timed whole."""
    from rft_platform.experience.file_names import round_key
    from rft_platform.experience.store import ExperienceStore

    store = ExperienceStore(home / "rounds")
    rounds = store.rounds()
    row = store.read_rollouts(rounds[-len(rounds) // 4], ["row_id", "run_id"]).slice(0, 1).to_pylist()[0]
    return {
        "rft trace ROW_ID": ["trace", row["row_id"]],
        "rft trace RUN_ID": ["trace", row["run_id"]],
        "rft trace models:/NAME@champion": ["trace", "models:/size-grown@champion"],
        "rft trace ROUND": ["trace", round_key(rounds[-2])],
    }


def summary(seconds: list[Seconds], peak: float) -> dict[str, Any]:
    """Median and slowest of some repetitions; processor seconds tell how much of it was this process's own work."""
    walls, cpu = zip(*seconds, strict=True)
    return {
        "median_s": round(median(walls), 4),
        "slowest_s": round(max(walls), 4),
        "median_cpu_s": round(median(cpu), 4),
        "times": len(seconds),
        "peak_rss_mb": peak,
    }


def ask_object_store(home: Path, latency_s: float) -> dict[str, Any]:
    """Every question about a project on an object store, to the home that wrote it and to an empty one."""
    import store_on_s3

    def ask(name: str, root: Path, what: str, times: int) -> dict[str, Any]:
        command = [sys.executable, str(Path(__file__).absolute()), "--ask", what, "--home", str(root)]
        if what.startswith("trace "):
            command = [sys.executable, "-m", "rft_platform", *what.split()]
        answer = measure(command, root, repeats=times)
        seconds = answer["seconds"]
        if what.startswith("sensor tick"):  # without the start of the process
            seconds = [tuple(pair) for printed in answer["outputs"] for pair in json.loads(printed.splitlines()[-1])]
        found = summary(seconds, answer["peak_rss_mb"])
        say(name, found)
        return found

    shutil.rmtree(home / "store", ignore_errors=True)  # a kept project was on a server that has ended
    targets = {name: arguments[-1] for name, arguments in commands(home).items()}
    with store_on_s3.s3_server(latency_s) as proxy:
        found = store_on_s3.measure_all(home, proxy, ask, targets)
    return {**found, "missed": store_on_s3.missed(found)}


def ask_stored(name: str, home: Path) -> bool:
    """Answer a question of ``store_on_s3`` in this process; False if there is no such question."""
    questions = {"store": "ask_store", "take over": "ask_take_over", "note": "ask_note"}
    if name not in questions:
        return False
    import store_on_s3

    getattr(store_on_s3, questions[name])(home)
    return True


def upkeep(home: Path) -> dict[str, dict[str, Any]]:
    """Compaction of the whole store and verification of every byte, each once."""
    rft = str(Path(sys.executable).parent / "rft")
    found = {}
    for name, arguments in {
        "rft store check": ["store", "check"],
        "rft store compact": ["store", "compact", "--grace-s", "0"],
    }.items():
        answer = measure([rft, *arguments], home)
        found[name] = {**summary(answer["seconds"], answer["peak_rss_mb"]), "said": answer["output"].splitlines()}
        say(name, found[name])
    return found


def say(name: str, answer: dict[str, Any]) -> None:
    """Print one line while the benchmark goes on."""
    wall, cpu, peak = answer["median_s"], answer["median_cpu_s"], answer["peak_rss_mb"]
    print(f"{name:<34}{wall:>9.3f} s{cpu:>9.3f} s cpu{peak:>9.0f} MB", flush=True)


def main() -> None:
    """Make the project, ask, compact, ask again, write the result; exit code 1 where a limit is not kept."""
    from machine import describe
    from store_project import Size, make_project

    from rft_platform.common.files import write_json
    from rft_platform.config.home import Home
    from rft_platform.run.machine import installed_version

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--work", type=Path, default=Path("/tmp/store_at_size"), help="where the project is made")
    options.add_argument("--home", type=Path, help="a project that was kept; nothing is made")
    options.add_argument("--rounds", type=int, default=Size.rounds)
    options.add_argument("--rows", type=int, default=Size.rows, help="of a round")
    options.add_argument("--keep", action="store_true", help="leave the project where it is")
    options.add_argument("--result", type=Path)
    options.add_argument("--object-store", action="store_true", help="ask about a project on an S3 server")
    options.add_argument("--latency-ms", type=float, default=20.0, help="of each request to it")
    options.add_argument("--ask", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.ask:
        if ask_stored(chosen.ask, chosen.home):
            return
        print(json.dumps(QUESTIONS[chosen.ask](chosen.home)))
        return
    versions = {name: installed_version(name) for name in ("pyarrow", "duckdb")}
    size, result = Size(chosen.rounds, chosen.rows), {"machine": describe() | versions}
    home = (chosen.home or chosen.work / "home").absolute()
    if chosen.home is None:
        shutil.rmtree(home, ignore_errors=True)
        result["generation_s"] = {name: round(s, 1) for name, s in make_project(Home(home), size).items()}
        print(f"made {size.rounds * size.rows:,} rows in {result['generation_s']}", flush=True)
    result["settings"] = {"rounds": size.rounds, "rows": size.rounds * size.rows, "files_a_round": size.batches + 1}
    result["disk_mb"] = round(sum(f.stat().st_size for f in (home / "rounds").rglob("*.*")) / 1e6)
    if chosen.object_store:
        result |= {"latency_ms": chosen.latency_ms, **ask_object_store(home, chosen.latency_ms / 1000)}
    else:
        result["as written"] = ask_all(home)
        result["upkeep"] = upkeep(home)
        result["compacted"] = ask_all(home)
        result["missed"] = missed(
            {**result["as written"], **{f"{n}, compacted": a for n, a in result["compacted"].items()}}
        )
    file = chosen.result or (RESULT_S3 if chosen.object_store else RESULT)
    write_json(file, result)
    if not chosen.keep and chosen.home is None:
        shutil.rmtree(home)
    print(f"{file}: missed {result['missed'] or 'no limit'}")
    sys.exit(bool(result["missed"]))


def missed(answers: dict[str, dict[str, Any]]) -> list[str]:
    """Names of the questions that took longer, or more memory, than is demanded."""
    return [
        name
        for name, answer in answers.items()
        if answer["median_s"] > LIMITS_S.get(name.removesuffix(", compacted"), float("inf"))
        or answer["peak_rss_mb"] > MAX_RSS_MB
    ]


if __name__ == "__main__":
    main()
