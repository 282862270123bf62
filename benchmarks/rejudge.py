"""Judging a stored round anew: seconds for 10,000 rows with a rule judge, checks and the store's writing included.

The rows are made up (prompts and answers as the arithmetic recipe's, eight answers a task); the judge is the built-in
``math`` one, then ``numeric``: two judgements of one round, as a backfill from the interface makes them.

The rate of the judge ``regex`` alone is measured with a time limit for every search, and as it is: without one where
the search is short. The two take turns.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

HERE = Path(__file__).resolve().parent
REPEAT = 8
TOKENS = 32


def make_round(work: Path, rows: int) -> Any:
    """A project whose round 1 holds ``rows`` stored rollouts."""
    from rft_platform.config.home import Home
    from rft_platform.experience.record import RolloutRow, row_id
    from rft_platform.rollout.recording.history import group_id, run_id
    from rft_platform.rounds.project.project import Project

    tasks = work / "tasks.jsonl"
    count = rows // REPEAT
    lines = [json.dumps({"question": f"{n} + {n + 1} = ?", "answer": str(2 * n + 1)}) for n in range(count)]
    tasks.write_text("\n".join(lines) + "\n")
    home = Home(work / "home")
    home.root.mkdir()
    taskset = {"path": str(tasks), "judge": "math"}
    config = {
        "model": {"model_path": "unused"},
        "algorithm": {"repeat_times": REPEAT},
        "buffer": {"batch_size": count, "total_steps": 1, "explorer_input": {"taskset": taskset}},
    }
    home.config_file.write_text(json.dumps(config))
    project = Project.open(home)
    made = [
        RolloutRow.from_columns(
            row_id=row_id(run_id(1, 0, index, repeat), 0, 0),
            task_id=task.task_id,
            taskset=task.taskset,
            group_id=group_id(1, 0, index),
            run_id=run_id(1, 0, index, repeat),
            step=0,
            msg_id=f"m{index}-{repeat}",
            round=1,
            policy_version=0,
            engine="made up",
            template_hash="t",
            prompt_ids=list(range(TOKENS)),
            response_ids=list(range(TOKENS)),
            rollout_logprobs=[-0.5] * TOKENS,
            loss_mask=[True] * TOKENS,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            finish_reason="stop",
            truncated=False,
            messages=[{"role": "user", "content": task.prompt}],
            tools=[],
            response={"role": "assistant", "content": _answer(index, repeat)},
        )
        for index, task in enumerate(project.tasks.tasks)
        for repeat in range(REPEAT)
    ]
    project.store.write_rollouts(1, 0, made)
    return project


def _answer(index: int, repeat: int) -> str:
    """An answer with its working; half of them are right, no two are equal."""
    return f"Try {repeat}: {index} and {index + 1} make \\boxed{{{2 * index + 1 + repeat % 2}}}."


def main() -> None:
    """Judge twice and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "rejudge.json")
    given = parser.parse_args()
    from rft_platform.rounds.judge import judge
    from rft_platform.rounds.setup.taskset_binding import OtherJudge

    with tempfile.TemporaryDirectory() as folder:
        project = make_round(Path(folder), given.rows)
        seconds, cpu_seconds = {}, {}
        for name in ("math", "numeric"):
            started, cpu = perf_counter(), process_time()
            summary = judge(project, 1, OtherJudge(name))
            seconds[name] = round(perf_counter() - started, 2)
            cpu_seconds[name] = round(process_time() - cpu, 2)
            if not summary.sound or summary.rows != given.rows:
                raise SystemExit(f"judging with {name} went wrong: {summary}")
        versions = project.store.judge_versions(1)
    report = {
        "what": "seconds to judge a stored round anew with a rule judge",
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "rows": given.rows,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rows_per_s": {name: round(given.rows / each) for name, each in seconds.items()},
        "judgements_kept": len(versions),
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
