"""Our side of ``training_vs_trl.py``: told over stdin to run some optimiser steps at a time.

Each line read is a number of steps, each line written is what they took: wall seconds, of which seconds in generation
and scoring, and the peak memory so far. A step is the trainer's own (``OptimizerStep``), on rows of the embedded engine
where it is GRPO; the engine then takes the new weights.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from in_process import Sampler, Task, Trainer, one_step, passed, rollout_rows

from rft_platform.algorithms.presets import preset
from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.training.data.offline_data import read_demonstrations, read_preferences
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.plan import stream_steps
from rft_platform.training.loop.step_metrics import peak_rss_mb
from rft_platform.training.protocol import TrainRequest

Steps = Callable[[int], dict[str, Any]]


def graded(task: Task, text: str, ended: bool) -> float:
    """1 for the answer, less the further away: runs of a group seldom have equal rewards."""
    text = text.strip()
    return -abs(int(text) - int(task["answer"])) / 1000 if text.isdecimal() else -1.0


def make_trainer(given: argparse.Namespace) -> Trainer:
    """The trainer of the algorithm asked for."""
    chosen = preset(given.what)
    algorithm = AlgorithmSpec(
        policy_loss=chosen.policy_loss, policy_loss_args=dict(chosen.policy_loss_args),
        loss_agg_mode=chosen.loss_agg_mode,
    )  # fmt: skip
    request = TrainRequest(
        parent=str(given.model), parent_version=0, output=str(given.work), algorithm=algorithm,
        optimizer=OptimizerSpec(lr=given.lr, betas=(0.9, 0.99)), train_batch_size=given.batch,
        reference=str(given.model) if chosen.reference == "always" else None,
    )  # fmt: skip
    return Trainer(request, Ranks.join("cpu"), torch.bfloat16 if given.bf16 else torch.float32)


def grpo(given: argparse.Namespace, tasks: list[Task]) -> Steps:
    """Rollouts, judgement, one update, new weights to the engine."""
    trainer = make_trainer(given)
    sampler = Sampler(given.model, given.max_tokens, trainer.dtype)
    reward = graded if given.graded else passed
    draw = np.random.default_rng(1)

    def run(count: int) -> dict[str, Any]:
        exploring, shares = 0.0, []
        for _ in range(count):
            started = time.perf_counter()
            chosen = [tasks[i] for i in draw.choice(len(tasks), given.batch // given.runs, replace=False)]
            rollouts = sampler.rollouts(chosen, given.runs, reward, seed=int(draw.integers(1 << 31)))
            rows = rollout_rows(rollouts, "grpo", {})
            exploring += time.perf_counter() - started
            shares += [event.metrics["computed_share"] for event in trainer.train(rows, one_step(rows))]
            sampler.take(trainer.weights)
        return {"generation_and_scoring": exploring, "computed_share": float(np.mean(shares))}

    return run


def offline(given: argparse.Namespace, tasks: list[Task], read: Callable[[str, Path], TrainingRows]) -> Steps:
    """Steps over the next rows of a shuffled stream; a reference's log-probs are computed as they are first needed."""
    user, assistant = ("user", "question"), ("assistant", "answer")
    sft = {"messages": [user, assistant]}
    dpo = {"prompt": [user], "chosen": [assistant], "rejected": [("assistant", "rejected")]}
    table = {
        column: [json.dumps([{"role": role, "content": task[key]} for role, key in messages]) for task in tasks]
        for column, messages in (sft if given.what == "sft" else dpo).items()
    }
    file = Path(given.work) / f"{given.what}.parquet"
    pq.write_table(pa.table(table), file)
    rows, trainer = read(str(file), given.model), make_trainer(given)

    def run(count: int) -> dict[str, Any]:
        position = trainer.steps * given.batch
        trainer.train(rows, list(stream_steps(rows.group, given.batch, 0, position, count * given.batch)))
        return {}

    return run


def main() -> None:
    """Answer commands until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("grpo", "sft", "dpo"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with question, answer and rejected")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", type=int, default=0)
    parser.add_argument("--batch", type=int, required=True, help="completions, samples or pairs an optimiser step")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=6)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--graded", type=int, default=0, help="reward by distance instead of equality")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(given.threads)
    tasks = [json.loads(line) for line in given.data.read_text().splitlines()]
    given.work.mkdir(parents=True, exist_ok=True)
    makers = {
        "grpo": lambda: grpo(given, tasks),
        "sft": lambda: offline(given, tasks, read_demonstrations),
        "dpo": lambda: offline(given, tasks, read_preferences),
    }
    run = makers[given.what]()
    answer: dict[str, Any] = {"ready": True}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        started = time.perf_counter()
        facts = run(int(line))
        seconds = time.perf_counter() - started
        memory = peak_rss_mb()
        answer = {"steps": int(line), "seconds": seconds, "peak_rss_mb": memory, **facts}


if __name__ == "__main__":
    main()
