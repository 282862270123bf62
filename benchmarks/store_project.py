"""A project as it stands after many rounds, made in minutes: rows, judgements, notes, checkpoints, registry and runs.

Rows go through the store itself. Only their making is short-cut: a few rounds' worth of rows with random token ids,
log-probs and texts are built once, and every round gets a copy of one with ids, numbers and times of its own.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from rft_platform.common.files import atomic_path, digest_file, write_sealed_json, write_text
from rft_platform.config.home import Home
from rft_platform.experience import schema
from rft_platform.experience.file_names import round_key
from rft_platform.experience.parquet import write_table
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.experience.selections import FILTERED, FRESH, REPLAY, SELECTION_SCHEMA, STALE, selection_file
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import Canary
from rft_platform.rounds.project.record import (
    Explored,
    Judged,
    Policy,
    RoundEvaluation,
    RowSelection,
    Trained,
    write,
    write_snapshot,
)
from rft_platform.training.protocol import StepEvent

PROJECT, NAME, JUDGE = "size", "grown", "exact@1"
PROMPT, RESPONSE, REPEATS, STEPS_A_ROUND = 30, 12, 8, 8
_TEMPLATES = 4


@dataclass(frozen=True)
class Size:
    """How large a project to make."""

    rounds: int = 1000
    rows: int = 10_000  # of a round
    batches: int = 2  # explore batches of a round


def make_project(home: Home, size: Size) -> dict[str, float]:
    """Make the project below ``home``; returns the seconds that each part took."""
    from rft_platform.online.project import open_project
    from rft_platform.rounds.setup.connections import connect_registry

    tasks = home.root / "tasks.jsonl"
    write_text(tasks, "\n".join(f'{{"question": "{i}+{i}=", "answer": "{2 * i}"}}' for i in range(64)))
    config = {
        "project": PROJECT,
        "name": NAME,
        "model": {"model_path": "base"},
        "algorithm": {"repeat_times": REPEATS},
        "buffer": {
            "batch_size": size.rows // size.batches // REPEATS,
            "total_steps": (size.rounds + 10) * size.batches,
            "explorer_input": {"taskset": {"path": str(tasks)}},
        },
        "synchronizer": {"sync_interval": size.batches},
    }
    write_text(home.config_file, yaml.safe_dump(config))
    project = open_project(home)
    connect_registry(project).prepare()  # before any note names a version
    seconds: dict[str, float] = {}
    for name, make in (("rows", make_rounds), ("registry", make_versions), ("runs", make_runs)):
        started = time.perf_counter()
        make(project, size)
        seconds[name] = time.perf_counter() - started
    return seconds


def make_rounds(project: Any, size: Size) -> None:
    """Rows, judgement, notes and checkpoint manifest of every round; the last one is explored but not yet trained."""
    random = np.random.default_rng(0)
    templates = [template(random, size.rows) for _ in range(_TEMPLATES)]
    parent = "base"
    write(project.store, 0, policy("base", 0, 0))
    write(project.store, 0, RoundEvaluation(promoted=True, metrics={}))
    for number in range(1, size.rounds + 1):
        rollouts, judged = of_round(templates[number % _TEMPLATES], random, number, size.batches)
        write_rows(project.store, number, rollouts, judged, size.batches)
        write_notes(project.store, number, size.rows)
        if number < size.rounds:
            parent = publish(project, number, parent, select_all(project.store, number, rollouts))


def template(
    random: np.random.Generator, rows: int, prompt: int = PROMPT, response: int = RESPONSE
) -> tuple[pa.Table, pa.Table]:
    """Rollouts and judgements of a round with random contents; ``prompt`` and ``response`` count tokens."""
    prompts, responses = random.integers(0, 32_000, (rows, prompt)), random.integers(0, 32_000, (rows, response))
    logprobs = np.log(random.uniform(0.05, 1.0, (rows, response))).astype(np.float32)
    numbers, rewards = random.integers(0, 10_000, (rows, 3)), random.integers(0, 2, rows)
    rollouts = [
        RolloutRow.from_columns(
            row_id="", task_id=f"task-{numbers[i // REPEATS, 2]:05d}", taskset="arithmetic", group_id="", run_id="",
            step=0, msg_id="", round=0, policy_version=0, engine="transformers 5.16.1", template_hash="a" * 64,
            prompt_ids=prompts[i].tolist(), response_ids=responses[i].tolist(), rollout_logprobs=logprobs[i].tolist(),
            loss_mask=[True] * response, temperature=1.0, top_p=1.0, top_k=-1, finish_reason="stop", truncated=False,
            messages=[
                {"role": "system", "content": "Answer with a number and nothing else."},
                {"role": "user", "content": f"{numbers[i // REPEATS, 0]}+{numbers[i // REPEATS, 1]}="},
            ],
            tools=[], response={"role": "assistant", "content": str(numbers[i, 2])}, run_output=str(numbers[i, 2]),
            metrics={"turns": 1.0}, duration_s=float(random.uniform(0.1, 3.0)), attempt=0,
        )
        for i in range(rows)
    ]  # fmt: skip
    judged = [
        JudgedRow("", "", "", 0, float(reward), {"exact": float(reward)}, JUDGE, float(reward) - 0.5,
                  "truncated" if i % 100 == 0 else None)
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return schema.rows_to_table(rollouts), schema.judged_to_table(judged)


def of_round(
    tables: tuple[pa.Table, pa.Table], random: np.random.Generator, number: int, batches: int
) -> tuple[pa.Table, pa.Table]:
    """A copy of a template with the ids, numbers and times of round ``number``."""
    rollouts, judged = tables
    rows, key = rollouts.num_rows, round_key(number)
    groups = np.arange(rows) // REPEATS
    group_ids = pa.array([f"{key}-b{g * REPEATS * batches // rows:04d}-t{g:05d}" for g in groups])
    run_ids = pa.array([f"{group}-{i % REPEATS:03d}" for i, group in enumerate(group_ids.to_pylist())])
    columns = {"row_id": hex_ids(random, rows, 16), "group_id": group_ids, "run_id": run_ids}
    own = {
        "msg_id": hex_ids(random, rows, 12),
        "round": pa.array(np.full(rows, number, np.int32)),
        "policy_version": pa.array(np.full(rows, STEPS_A_ROUND * (number - 1), np.int64)),
        "created_at": pa.array(1.7e9 + 600.0 * number + np.arange(rows) * 0.05),
    }
    return replaced(rollouts, {**columns, **own}), replaced(judged, columns)


def hex_ids(random: np.random.Generator, rows: int, size: int) -> pa.StringArray:
    """``rows`` random texts of ``2 * size`` hexadecimal digits."""
    digits = pa.py_buffer(random.bytes(size * rows).hex().encode())
    offsets = pa.py_buffer(np.arange(0, 2 * size * rows + 1, 2 * size, dtype=np.int32))
    return pa.StringArray.from_buffers(rows, offsets, digits)


def replaced(table: pa.Table, columns: dict[str, pa.Array]) -> pa.Table:
    """``table`` with some of its columns exchanged."""
    return pa.Table.from_arrays([columns.get(name, table[name]) for name in table.column_names], schema=table.schema)


def write_rows(store: ExperienceStore, number: int, rollouts: pa.Table, judged: pa.Table, batches: int) -> None:
    """Write a round's rows as its explore batches and its judge would."""
    size = rollouts.num_rows // batches
    for batch in range(batches):
        store.write_rollout_table(number, batch, rollouts.slice(batch * size, size))
    store.write_judged_table(number, JUDGE, judged)


def write_notes(store: ExperienceStore, number: int, rows: int) -> None:
    """The notes of exploration and judgement."""
    write_snapshot(store, number, policy("", STEPS_A_ROUND * (number - 1), number - 1))
    write(store, number, Explored(rows=rows, seconds=60.0, tokens_per_s=2000.0))
    write(store, number, Judged(rows=rows, judge_version=JUDGE, mean_reward=0.5, sound=True))


def policy(folder: str, version: int, number: int) -> Policy:
    """A published policy, with a canary of usual size."""
    canary = Canary([[7] * (PROMPT + RESPONSE)] * 8, [[-0.123456789] * (PROMPT + RESPONSE - 1)] * 8)
    return Policy(folder, version, f"weights{version}", round=number, canary=canary, model_version=str(number) or None)


def select_all(store: ExperienceStore, number: int, rollouts: pa.Table) -> RowSelection:
    """The row selection of a training that takes all rows of its round, as in the style fixed."""
    rows = rollouts.num_rows
    more = {"judge_version": pa.repeat(JUDGE, rows), "use": pa.repeat(FRESH, rows), "uses": pa.repeat(0, rows)}
    columns = [more[name] if name in more else rollouts[name] for name in SELECTION_SCHEMA.names]
    file = selection_file(store, number)
    with atomic_path(file) as temporary:
        write_table(pa.Table.from_arrays(columns, SELECTION_SCHEMA.names).cast(SELECTION_SCHEMA), temporary)
    digest, version = store.digest(number), STEPS_A_ROUND * (number - 1)
    counts = {FRESH: rows, REPLAY: 0, FILTERED: 0, STALE: 0}
    selection = RowSelection(
        counts, {number: JUDGE}, digest_file(file), digest, [number], version, [version, version], landed=number
    )
    write(store, number, selection)
    return selection


def publish(project: Any, number: int, parent: str, selection: RowSelection) -> str:
    """Checkpoint manifest and the notes of training and evaluation; returns the checkpoint's folder."""
    version = STEPS_A_ROUND * number
    folder = project.checkpoints / f"global_step_{version}"
    lineage = {
        "round": number, "project": PROJECT, "name": NAME, "base_model": "base", "taskset_digest": "t" * 64,
        "data_digest": project.store.digest(number), "judge_version": JUDGE, "config_digest": "c" * 64,
        "code_version": "0" * 40, "dagster_run_id": f"run-{number}",
        "row_selection": {
            "sha256": selection.sha256, "rows": selection.rows, "judge_versions": {str(number): JUDGE},
            "digests": {str(number): selection.digest}, "policy_versions": selection.policy_versions,
        },
    }  # fmt: skip
    manifest = {
        "policy_version": version, "parent": parent, "parent_version": version - STEPS_A_ROUND,
        "weights_digest": f"weights{version}", "lineage": lineage,
        "request": {"rollouts": [], "seed": number, "output": str(folder.parent)},
        "files": {name: written(folder / name, version) for name in ("model.safetensors", "config.json", "state")},
    }  # fmt: skip
    write_sealed_json(folder / "manifest.json", manifest)
    write(project.store, number, policy(str(folder), version, number))
    steps = [StepEvent(step, {"loss": 0.1, "entropy": 1.0}) for step in range(STEPS_A_ROUND)]
    metrics = {"mismatch_k3": 0.001}
    write(
        project.store,
        number,
        Trained(str(folder), version, f"weights{version}", STEPS_A_ROUND, metrics, {}, 0.0, step_events=steps),
    )
    scores = {"sampled_pass": 0.5, "greedy_pass": 0.6}
    write(project.store, number, RoundEvaluation(promoted=True, metrics=scores))
    return str(folder)


def written(file: Path, version: int) -> dict[str, Any]:
    """Write a small file of a checkpoint; returns its entry in the manifest."""
    text = json.dumps({"version": version})
    write_text(file, text)
    return {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def make_versions(project: Any, size: Size) -> None:
    """A model version for every checkpoint, the newest of them champion."""
    from rft_platform.rounds.setup.connections import connect_registry

    registry = connect_registry(project)
    for number in range(1, size.rounds):
        version = STEPS_A_ROUND * number
        folder = project.checkpoints / f"global_step_{version}"
        tags = {"weights_digest": f"weights{version}", "round": number}
        registry.register_checkpoint(folder, version, tags)
    registry.promote(size.rounds - 1)


def make_runs(project: Any, size: Size) -> None:
    """The run records of both jobs of every round, every fiftieth of which failed once."""
    import dagster as dg

    from rft_platform.jobs.instance import open_instance
    from rft_platform.jobs.jobs import JOB_OF_KIND

    with open_instance(project.home) as instance:
        for number in range(1, size.rounds):
            for kind in ("explore", "sync"):
                outcomes = ["FAILURE"] * (number % 50 == 0) + ["SUCCESS"]
                for outcome in outcomes:
                    run = dg.DagsterRun(
                        job_name=JOB_OF_KIND[kind],
                        status=dg.DagsterRunStatus(outcome),
                        tags={"dagster/partition": round_key(number), "rft/round": round_key(number)},
                    )
                    instance.add_run(run)
