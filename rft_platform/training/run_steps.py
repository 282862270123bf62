"""Run the optimiser steps of one training: gradients, clipping, update, and the metrics of each step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from rft_platform.errors import NonFiniteError, TrainingCancelled, some
from rft_platform.training.batches import share_of_rank
from rft_platform.training.blame import culprits, not_finite
from rft_platform.training.critic import Critic
from rft_platform.training.critic_step import critic_alone, step_critic
from rft_platform.training.flops import TrainingCost, added_flops
from rft_platform.training.layers import compiled_graphs
from rft_platform.training.logprobs import PackedPolicy
from rft_platform.training.optimizer import apply_step, clip_gradients, gradient_norm
from rft_platform.training.peak_flops import peak_flops
from rft_platform.training.plan import TrainingPlan
from rft_platform.training.protocol import StepEvent, TrainRequest
from rft_platform.training.ranks import Ranks
from rft_platform.training.state import TrainerState
from rft_platform.training.step import accumulate_gradients, warm_up
from rft_platform.training.step_metrics import DeviceClock, Stopwatch, memory_mb, row_metrics

OnStep = Callable[[StepEvent], None]


@dataclass(slots=True)
class StepRun:
    """Run the steps of ``plan`` on ``state``. Every rank makes the same calls."""

    state: TrainerState
    plan: TrainingPlan
    request: TrainRequest
    ranks: Ranks
    watch: Stopwatch = field(default_factory=Stopwatch)  # seconds by phase
    prepared: dict[str, float] = field(default_factory=dict)  # metrics of the preparation, reported with each step
    teacher: PackedPolicy | None = None  # for distillation losses
    _shares: dict[bytes, np.ndarray] = field(default_factory=dict)

    def run(
        self,
        on_step: OnStep,
        cancelled: Callable[[], bool],
        events: list[StepEvent],
        after_step: Callable[[list[StepEvent]], None],
    ) -> None:
        """Run the steps that are not in ``events`` yet, and append their events to it.

        Before each step ``cancelled`` is called (only rank 0's answer counts); after each step ``after_step`` is
        called. Raises TrainingCancelled or NonFiniteError; the state is then somewhere between the parent and the
        result.
        """
        with self.watch.time("compile"):
            warm_up(self.state.policy, self.request.max_tokens_per_pack)
        for number, chosen in enumerate(self.plan.steps[len(events) :], start=len(events)):
            if self.ranks.broadcast(cancelled()):
                raise TrainingCancelled(f"training was cancelled before step {number + 1} of {len(self.plan.steps)}")
            step = self.request.parent_version + number
            events.append(StepEvent(step + 1, self._step(chosen, step)))
            on_step(events[-1])
            after_step(events)

    def share(self, chosen: np.ndarray) -> np.ndarray:
        """Return this rank's part of a step's rows. The answer never changes, even if the rows are modified later."""
        if self.ranks.world_size == 1:
            return chosen
        key = chosen.tobytes()
        if key not in self._shares:
            rows, ranks = self.plan.rows, self.ranks
            self._shares[key] = share_of_rank(chosen, rows.group, self._costs(chosen), ranks.rank, ranks.world_size)
        return self._shares[key]

    def _costs(self, chosen: np.ndarray) -> np.ndarray:
        """Operations that each ``chosen`` row adds. Shared prefixes count once; rows without a gradient count 0."""
        inert = self.plan.objective.zero_advantage_is_inert and self.request.algorithm.token_advantage is None
        samples = [self.plan.rows.samples[row] for row in chosen]
        run = np.array([not inert or sample.expert or bool(np.any(sample.advantage)) for sample in samples])
        costs = np.zeros(len(chosen))
        computed = [sample for sample, is_run in zip(samples, run, strict=True) if is_run]
        costs[run] = added_flops(TrainingCost.of(self.state.policy), computed)
        return costs

    def _step(self, chosen: np.ndarray, step: int) -> dict[str, float]:
        """Run the update from global step ``step``. Raises NonFiniteError if loss or gradient are not finite."""
        lap, cpu, clock = Stopwatch(), time.process_time(), DeviceClock(self.ranks.device)
        graphs = compiled_graphs()
        if critic_alone(self.state.critic, self.request.algorithm.critic):
            metrics = self._sizes(chosen)
        else:
            metrics = self._update_policy(chosen, step, lap, clock)
        if self.state.critic is not None:
            with lap.time("critic"):
                metrics |= self._update_critic(self.state.critic, chosen, step)
            metrics["critic_seconds"] = lap.seconds["critic"]
        self.watch.add(lap)
        return {
            **metrics,
            **self.prepared,
            **row_metrics(self.plan.rows, chosen, step),
            **self._speed(metrics, lap, clock),
            "cpu_seconds": self.ranks.total(time.process_time() - cpu),
            "compilations": float(compiled_graphs() - graphs),
        }

    def _update_policy(self, chosen: np.ndarray, step: int, lap: Stopwatch, clock: DeviceClock) -> dict[str, float]:
        spec = self.request.optimizer
        with lap.time("forward_backward"):
            metrics = self._accumulate(chosen, chosen, clock)
        with lap.time("optimizer"):
            norm = clip_gradients(self.state.policy.parameters(), spec.clip_grad)
            if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
                raise NonFiniteError(self._blame(chosen, step, norm, metrics["loss"]))
            rate = apply_step(self.state.optimizer, spec, step)
        return metrics | {"lr": rate, "grad_norm": norm}

    def _update_critic(self, critic: Critic, chosen: np.ndarray, step: int) -> dict[str, float]:
        spec = self.request.algorithm.critic
        assert spec is not None, "a state has a critic where the algorithm has one"
        return step_critic(
            critic,
            spec,
            [self.plan.rows.samples[row] for row in self.share(chosen)],
            step=step,
            max_tokens_per_pack=self.request.max_tokens_per_pack,
            reduce=self.ranks.reduce,
            world_size=self.ranks.world_size,
        )

    def _sizes(self, chosen: np.ndarray) -> dict[str, float]:
        """Metrics of a step that trains the critic only."""
        samples = [self.plan.rows.samples[row] for row in chosen]
        return {
            "rows": float(len(samples)),
            "tokens": float(sum(np.count_nonzero(sample.loss_mask) for sample in samples)),
            "tokens_unpacked": float(sum(len(sample.token_ids) for sample in samples)),
            "lr": 0.0,
        }

    def _accumulate(self, chosen: np.ndarray, part: np.ndarray, clock: DeviceClock | None = None) -> dict[str, float]:
        """Add the gradient of those ``chosen`` rows that are in ``part``."""
        mine = self.share(chosen)
        rows = mine if part is chosen else mine[np.isin(mine, part)]
        return accumulate_gradients(
            self.state.policy,
            [self.plan.rows.samples[row] for row in rows],
            self.request.algorithm,
            max_tokens_per_pack=self.request.max_tokens_per_pack,
            reduce=self.ranks.reduce,
            world_size=self.ranks.world_size,
            clock=clock,
            teacher=self.teacher,
        )

    def _speed(self, metrics: dict[str, float], lap: Stopwatch, clock: DeviceClock) -> dict[str, float]:
        """Timings, throughput and memory of a step. Device timings and memory are the maximum over the ranks."""
        ranks, seconds = self.ranks, sum(lap.seconds.values())
        own = {f"{name}_seconds": value for name, value in clock.seconds().items()} | memory_mb(ranks.device)
        largest = ranks.reduce(torch.tensor(list(own.values()), dtype=torch.float64), "max").tolist()
        peak = ranks.world_size * peak_flops(ranks.device, self.state.policy.compute_dtype)
        return {
            "tokens_per_s": metrics["tokens_unpacked"] / seconds,
            "mfu": metrics.get("flops", 0.0) / (seconds * peak),
            "step_seconds": seconds,
            "forward_backward_seconds": lap.seconds["forward_backward"],
            "optimizer_seconds": lap.seconds["optimizer"],
            **dict(zip(own, largest, strict=True)),
        }

    def _blame(self, chosen: np.ndarray, step: int, norm: float, loss: float) -> str:
        """Error message for a rejected step. It names rows that are not finite on their own, and parameters."""
        policy, rows = self.state.policy, self.plan.rows

        def is_finite(part: np.ndarray) -> bool:
            policy.zero_grad()
            alone = self._accumulate(chosen, part)["loss"]
            return math.isfinite(alone) and math.isfinite(gradient_norm(policy.parameters()))

        whole = self.plan.objective.policy_loss.whole_groups
        units = [chosen[rows.group[chosen] == g] for g in np.unique(rows.group[chosen])] if whole else chosen[:, None]
        found = culprits(list(units), is_finite)
        is_finite(found[0] if found else chosen)
        gradients = not_finite(((name, p.grad) for name, p in policy.model.named_parameters()), self.ranks.reduce)
        weights = not_finite(policy.model.named_parameters(), self.ranks.reduce)
        policy.zero_grad()
        ids = [rows.samples[row].row_id for row in (np.concatenate(found) if found else chosen)]
        who = "rows that are not finite even alone" if found else "no row is at fault alone; the step's rows"
        return (
            f"step {step + 1} was refused: loss {loss}, gradient norm {norm}; {who}: {some(ids)}; parameters whose "
            f"gradient is not finite: {some(gradients)}; whose weights are not: {some(weights)}. "
            "Lower the learning rate or look at those rows"
        )
