"""The platform's parts in one process, without its control plane: sampling, judging, and the trainer's own steps.

For benchmarks of single parts. What runs is what the engine and the trainer run in their processes: the embedded
engine's decode loop, the judge's rule, the advantages, and ``OptimizerStep`` with everything computed that it reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rft_platform.algorithms.advantages.registry import compute_advantages
from rft_platform.algorithms.objective import Objective
from rft_platform.inference.interface import Completion, SamplingParams
from rft_platform.inference.transformers_engine.generator import Generator
from rft_platform.inference.transformers_engine.model import PolicyModel
from rft_platform.inference.transformers_engine.request import Request
from rft_platform.inference.transformers_engine.weights import replace_weights
from rft_platform.judging.rules.patterns import exact_match
from rft_platform.openai_api.templates import ChatTemplate
from rft_platform.openai_api.tokenizer import PolicyTokenizer
from rft_platform.training.checkpoint.reading import load_state
from rft_platform.training.data.rollout_rows import TrainingRows
from rft_platform.training.data.samples import rollout_sample
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.optimizer_step import OptimizerStep
from rft_platform.training.loop.plan import TrainingPlan
from rft_platform.training.loop.precompute import FrozenModel, Precompute
from rft_platform.training.loop.training_run import TrainingRun
from rft_platform.training.packed.packed_policy import warm_up
from rft_platform.training.protocol import StepEvent, TrainRequest

Task = Mapping[str, Any]
Reward = Callable[[Task, str, bool], float]
"""``(task, text, ended with the end token) -> reward``."""


def passed(task: Task, text: str, ended: bool) -> float:
    """1.0 for the exact answer and the end token."""
    return exact_match(dict(task), text) if ended else 0.0


@dataclass(slots=True)
class Rollout:
    """One completion of one task."""

    task: Task
    group: int
    prompt_ids: list[int]
    completion: Completion
    text: str
    reward: float


class Sampler:
    """The embedded engine's model, tokenizer and decode loop."""

    def __init__(self, folder: Path, max_tokens: int, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer = PolicyTokenizer(folder)
        self._template = ChatTemplate(self.tokenizer)
        self._model = PolicyModel(folder, dtype, torch.device("cpu"))
        self._generator = Generator(self._model, self.tokenizer.end_ids, self.tokenizer.decode)
        self._max_tokens = max_tokens

    def render(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Prompt ids of each task's question."""
        texts = [self._template.text([{"role": "user", "content": task["question"]}]) for task in tasks]
        return self.tokenizer.encode(texts)

    def rollouts(
        self, tasks: Sequence[Task], runs: int, reward: Reward = passed, *, seed: int | None, temperature: float = 1.0
    ) -> list[Rollout]:
        """``runs`` completions of every task, with their rewards."""
        sampling = SamplingParams(self._max_tokens, n=runs, temperature=temperature, seed=seed)
        request = Request(self.render(tasks), sampling, self._model.max_positions)
        self._generator.admit(request, request.rows)
        while self._generator.rows:
            self._generator.step()
        found = [(g, p.prompt_ids, c) for g, p in enumerate(request.future.result()) for c in p.completions]
        texts = self.tokenizer.decode_many([completion.token_ids for _, _, completion in found])
        return [
            Rollout(tasks[g], g, prompt, c, text, reward(tasks[g], text, c.finish_reason == "stop"))
            for (g, prompt, c), text in zip(found, texts, strict=True)
        ]

    def pass_rate(self, tasks: Sequence[Task], seed: int = 0) -> float:
        """Share of one sampled answer a task that passes."""
        return float(np.mean([rollout.reward for rollout in self.rollouts(tasks, 1, seed=seed)]))

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sample with other weights from now on."""
        replace_weights(self._model.module, dict(weights), Path("memory"))


def rollout_rows(rollouts: Sequence[Rollout], advantage: str, args: Mapping[str, Any]) -> TrainingRows:
    """The rows of a round of single-turn runs, with advantages."""
    groups = np.array([rollout.group for rollout in rollouts], np.int64)
    runs = np.arange(len(rollouts))
    rewards = np.array([rollout.reward for rollout in rollouts])
    advantages = compute_advantages(advantage, rewards, groups, runs, np.zeros_like(runs), **args)
    samples = [
        rollout_sample(str(i), r.prompt_ids, c.token_ids, c.logprobs, [True] * len(c.token_ids), advantage=a)
        for i, (r, a) in enumerate(zip(rollouts, advantages.tolist(), strict=True))
        for c in [r.completion]
    ]
    truncated = np.array([rollout.completion.finish_reason == "length" for rollout in rollouts])
    facts = {"policy_version": np.zeros_like(runs), "truncated": truncated, "reward": rewards}
    return TrainingRows(samples, groups, "", facts | {"run": runs, "step": np.zeros_like(runs)})


@dataclass(slots=True)
class Trainer:
    """A trainer's state in this process, and its steps on rows that are in memory."""

    request: TrainRequest  # everything but the rows
    ranks: Ranks
    dtype: torch.dtype = torch.float32
    steps: int = 0
    _run: TrainingRun = field(init=False)
    _precompute: Precompute = field(init=False)

    def __post_init__(self) -> None:
        asked = self.request
        state = load_state(
            Path(asked.parent), self.ranks, self.dtype, asked.optimizer,
            lora=asked.lora, version=0, seed=asked.seed, fresh=True, critic=asked.algorithm.critic,
        )  # fmt: skip
        objective = Objective.build(asked.algorithm)
        plan = TrainingPlan(TrainingRows([], np.zeros(0, np.int64), ""), [], None, objective, "", [])
        self._run = TrainingRun(state, plan, asked, self.ranks)
        self._precompute = Precompute(FrozenModel(self.ranks, self.dtype), FrozenModel(self.ranks, self.dtype))

    def train(self, rows: TrainingRows, steps: Sequence[np.ndarray]) -> list[StepEvent]:
        """Compute what the rows of these optimiser steps need, then run the steps."""
        self._run.plan.rows, self._run.plan.steps = rows, list(steps)
        self._precompute.compute(self._run)
        events: list[StepEvent] = []
        warm_up(self._run.state.policy, self.request.max_tokens_per_pack)
        for chosen in self._run.plan.steps:
            step = OptimizerStep(self._run, chosen, done=len(events))
            if step.trains_policy:
                step.accumulate_gradients()
                step.update_policy()
            step.update_critic()
            events.append(step.event())
        self.steps += len(events)
        return events

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The policy's parameters as they are now, whole."""
        named = self._run.state.policy.model.named_parameters()
        return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named}


def one_step(rows: TrainingRows) -> list[np.ndarray]:
    """All rows as one optimiser step."""
    return [np.arange(len(rows.samples))]
