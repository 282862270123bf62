"""Reinforcement fine-tuning in one file: the loop of the platform without its control plane.

A model of one million parameters learns additions. It answers each task several times, a judge rewards the answers,
GRPO compares the answers to one task, the trainer changes the weights, and the engine takes them. Each step is the call
that the platform makes too. Dagster adds the record of who made what, retries, schedules and an interface.

    python examples/bare_loop.py build/bare_loop    # --rounds 2 for a first look

The engine and the trainer are processes of their own. This program starts them, talks to them over HTTP, and ends them.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import Canary, update_checked
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import TasksetJudge, judge_rollouts
from rft_platform.recipes.recipe import recipe_named
from rft_platform.rollout.runner.run_rollouts import SingleTurn, run_rollouts
from rft_platform.tasks.dataset import load_tasks
from rft_platform.tasks.task import Task
from rft_platform.training.protocol import TrainRequest
from rft_platform.training.service.trainer_client import TrainerClient, find_or_start_trainer

RUNS_OF_A_TASK = 8  # GRPO compares them with each other
SAMPLING = SamplingParams(max_tokens=6, temperature=1.0)
WARM_START = OptimizerSpec(lr=2e-3, betas=(0.9, 0.99), lr_warmup_steps=20)
WARM_STEPS, WARM_ENOUGH = 20, 0.3  # the warm start ends at the first multiple of 20 steps at which 30 % are right
GRPO = OptimizerSpec(lr=6e-4, betas=(0.9, 0.99), lr_warmup_steps=10)


def judge(task: Mapping[str, Any], response: str) -> float:
    """The judge: a number for each run."""
    return float(response.strip() == task["answer"])


@dataclass(frozen=True)
class Policy:
    """Weights and their version: the number of optimiser steps that made them."""

    folder: str
    version: int = 0


@contextmanager
def processes(folder: Path, model: Path) -> Iterator[tuple[EngineClient, TrainerClient]]:
    """An engine that serves ``model``, and a trainer. Both end with the block."""
    spec = EngineSpec(kind="transformers", device="cpu", dtype="float32", max_model_len=64)
    cluster = LocalCluster(leases=folder, logs=folder)
    trainer = find_or_start_trainer(cluster, device="cpu")
    try:
        engine = find_or_start_engine(model, cluster, spec)
        try:
            yield engine, trainer
        finally:
            engine.shutdown()
    finally:
        trainer.shutdown()


def warm_start(trainer: TrainerClient, folder: Path, parent: Policy, tasks: Sequence[Task]) -> Policy:
    """Supervised fine-tuning on worked examples: a random model never answers right, so it has nothing to reinforce."""
    demonstrations = folder / "demonstrations.parquet"
    rows = {"prompt": [task.prompt for task in tasks], "response": [task.answer for task in tasks]}
    pq.write_table(pa.table(rows), demonstrations)
    result = trainer.train(
        TrainRequest(
            parent=parent.folder,
            parent_version=parent.version,
            output=str(folder / "warm_start"),
            algorithm=AlgorithmSpec(policy_loss="sft"),
            optimizer=WARM_START,
            demonstrations=str(demonstrations),
            train_batch_size=64,
            max_steps=WARM_STEPS,
        )
    )
    return Policy(result.checkpoint, result.policy_version)


def explore(engine: EngineClient, store: ExperienceStore, number: int, tasks: Sequence[Task]) -> None:
    """Run a workflow ``RUNS_OF_A_TASK`` times on each task. Each model call is a row: token ids, log-probs, messages.

    ``SingleTurn`` sends the prompt. An agent stands in its place: any function ``async (task, model)`` that calls the
    OpenAI client ``model.get_openai_async_client()``, which records.
    """
    workflow = SingleTurn()
    batch = run_rollouts(
        engine, tasks, workflow, round=number, batch=0, repeat_times=RUNS_OF_A_TASK, sampling=SAMPLING, seed=number
    )
    store.write_rollouts(number, 0, batch.rows)


def reward(store: ExperienceStore, number: int, tasks: Sequence[Task]) -> float:
    """Judge the stored rows and write rewards and advantages beside them; returns the mean reward.

    GRPO's advantage of a run is its reward minus the mean of its task's runs, divided by their standard deviation. Rows
    stay as they are: another judge can judge them again.
    """
    spec = build_judge(judge)
    rows = store.rollout_rows(number)
    by_id = {task.task_id: task for task in tasks}
    judged = judge_rollouts(rows, by_id, {rows[0].taskset: TasksetJudge(spec)}, advantage_fn="grpo")
    store.write_judged(number, spec.version, judged.rows)
    return sum(row.reward for row in judged.rows) / len(judged.rows)


def train(trainer: TrainerClient, store: ExperienceStore, number: int, parent: Policy, output: Path) -> Policy:
    """Optimiser steps on the rows of a round. The loss compares new log-probs with those that the engine recorded."""
    judged = store.in_force_file(number)
    assert judged is not None, f"round {number} was not judged"
    result = trainer.train(
        TrainRequest(
            parent=parent.folder,
            parent_version=parent.version,
            output=str(output),
            algorithm=AlgorithmSpec(policy_loss="ppo", loss_agg_mode="token-mean"),
            optimizer=GRPO,
            rollouts=tuple(map(str, store.rollout_files(number))),
            judged=(str(judged),),
            train_batch_size=512,
            fresh_optimizer=number == 1,  # the moments of the warm start belong to another loss
            seed=number,
        )
    )
    return Policy(result.checkpoint, result.policy_version)


def deploy(engine: EngineClient, trainer: TrainerClient, policy: Policy, tasks: Sequence[Task]) -> float:
    """Give the engine new weights in place. Returns the canary: the mean difference of its log-probs to the trainer's.

    An engine that computes with other weights than it says is refused, and serves the weights from before.
    """
    sequences = engine.render([[{"role": "user", "content": task.prompt}] for task in tasks[:8]])
    return update_checked(engine, Path(policy.folder), policy.version, Canary(sequences, trainer.score(sequences)))


def pass_rate(engine: EngineClient, tasks: Sequence[Task]) -> float:
    """The share of held-out tasks that one sampled answer solves."""
    prompts = engine.render([[{"role": "user", "content": task.prompt}] for task in tasks])
    generations = engine.generate(prompts, replace(SAMPLING, seed=0))
    texts = engine.decode([generation.completions[0].token_ids for generation in generations])
    return sum(judge(task.raw, text) for task, text in zip(tasks, texts, strict=True)) / len(tasks)


def loop(folder: Path, rounds: int, tasks_a_round: int) -> list[float]:
    """Warm start, then rounds; returns the held-out pass rates: after the warm start, and after each round."""
    demo = folder / "demo"
    if not demo.exists():
        recipe_named("arithmetic").write(demo)
    model, data = demo / "model", str(demo / "tasks")
    tasks = load_tasks(data, name="additions").tasks
    held_out = load_tasks(data, name="held out", split="test").tasks
    store = ExperienceStore(folder / "rounds")
    with processes(folder, model) as (engine, trainer):
        policy, found = Policy(str(model)), [0.0]
        while found[0] < WARM_ENOUGH:
            policy = warm_start(trainer, folder, policy, tasks)
            deploy(engine, trainer, policy, held_out)
            found = [pass_rate(engine, held_out)]
            print(f"warm start, step {policy.version}: {found[0]:.1%} of the held-out additions")
        for number in range(1, rounds + 1):
            first = (number - 1) * tasks_a_round % len(tasks)
            chosen = tasks[first : first + tasks_a_round]
            explore(engine, store, number, chosen)
            mean = reward(store, number, chosen)
            policy = train(trainer, store, number, policy, folder / "checkpoints")
            canary = deploy(engine, trainer, policy, held_out)
            found.append(pass_rate(engine, held_out))
            print(f"round {number}: mean reward {mean:.2f}, held out {found[-1]:.1%}, canary {canary:.1e} nats")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where model, rows and checkpoints are written")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=512, help="tasks a round")
    arguments = parser.parse_args()
    loop(arguments.folder.absolute(), arguments.rounds, arguments.tasks)
