"""The optimiser steps of one training: gradients, clipping, update, and what each step measured."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rft_platform.errors import NonFiniteError, TrainingCancelled
from rft_platform.training.batches import share_of_rank
from rft_platform.training.optimizer import apply_step, clip_gradients
from rft_platform.training.plan import TrainingPlan
from rft_platform.training.protocol import StepEvent, TrainRequest
from rft_platform.training.ranks import Ranks
from rft_platform.training.state import TrainerState
from rft_platform.training.step import accumulate_gradients, score
from rft_platform.training.step_metrics import Stopwatch, peak_rss_mb, row_metrics

OnStep = Callable[[StepEvent], None]
_NAMED = 5  # row ids that an error message names


@dataclass(slots=True)
class StepRun:
    """Runs the steps of ``plan`` on ``state``, on every rank alike."""

    state: TrainerState
    plan: TrainingPlan
    request: TrainRequest
    ranks: Ranks
    watch: Stopwatch = field(default_factory=Stopwatch)  # forward_backward and optimizer

    def run(self, on_step: OnStep, cancelled: Callable[[], bool]) -> list[StepEvent]:
        """All steps. ``cancelled`` is asked on rank 0 before each.

        Raises TrainingCancelled or NonFiniteError; the state is then somewhere between the parent and the result.
        """
        events: list[StepEvent] = []
        for number, chosen in enumerate(self.plan.steps):
            if self.ranks.broadcast(cancelled()):
                raise TrainingCancelled(f"training was cancelled before step {number + 1} of {len(self.plan.steps)}")
            step = self.request.parent_version + number
            events.append(StepEvent(step + 1, self._step(chosen, step)))
            on_step(events[-1])
        return events

    def share(self, chosen: np.ndarray) -> np.ndarray:
        """This rank's part of the rows of a step."""
        rows = self.plan.rows
        tokens = np.array([len(sample.token_ids) for sample in rows.samples])
        return share_of_rank(chosen, rows.group, tokens, self.ranks.rank, self.ranks.world_size)

    def _step(self, chosen: np.ndarray, step: int) -> dict[str, float]:
        """The update from global step ``step``; refused where loss or gradient are not finite."""
        lap, cpu, spec = Stopwatch(), time.process_time(), self.request.optimizer
        with lap.time("forward_backward"):
            metrics = accumulate_gradients(
                self.state.policy,
                [self.plan.rows.samples[row] for row in self.share(chosen)],
                self.request.algorithm,
                max_tokens_per_pack=self.request.max_tokens_per_pack,
                reduce=self.ranks.reduce,
                world_size=self.ranks.world_size,
            )
        with lap.time("optimizer"):
            norm = clip_gradients(self.state.policy.parameters(), spec.clip_grad)
            if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
                raise NonFiniteError(self._blame(chosen, step, norm, metrics["loss"]))
            rate = apply_step(self.state.optimizer, spec, step)
        self.watch.add(lap)
        seconds = sum(lap.seconds.values())
        return {
            **metrics,
            **row_metrics(self.plan.rows, chosen, step),
            "lr": rate,
            "grad_norm": norm,
            "tokens_per_s": metrics["tokens_unpacked"] / seconds,
            "step_seconds": seconds,
            "forward_backward_seconds": lap.seconds["forward_backward"],
            "optimizer_seconds": lap.seconds["optimizer"],
            "cpu_seconds": self.ranks.total(time.process_time() - cpu),
            "peak_rss_mb": self.ranks.largest(peak_rss_mb()),
        }

    def _blame(self, chosen: np.ndarray, step: int, norm: float, loss: float) -> str:
        """Message for a refused step, naming the rows whose log-probs are not finite, else some of the step's rows."""
        samples = [self.plan.rows.samples[row] for row in chosen]
        budget = self.request.max_tokens_per_pack
        values = score(self.state.policy, samples, max_tokens_per_pack=budget, reduce=self.ranks.reduce)
        bad = [sample.row_id for sample, row in zip(samples, values, strict=True) if not np.isfinite(row).all()]
        what = f"{len(bad)} rows have log-probs that are not finite" if bad else "no row stands out among"
        named = (bad or [sample.row_id for sample in samples])[:_NAMED]
        return (
            f"step {step + 1} was refused: loss {loss}, gradient norm {norm}; {what}: {', '.join(named)}. "
            "Lower the learning rate or look at those rows"
        )
