"""One optimiser step of a training: gradients, clipping, AdamW, the critic, and the metrics of the step.

If loss or gradient are not finite, the step is refused, and its rows are bisected to find those that cause this.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rft_platform.common.errors import NAMED, NonFiniteError, RftError, some
from rft_platform.training.distributed import Reduce
from rft_platform.training.loop.critic_step import critic_alone, step_critic
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.loop.step_metrics import DeviceClock, Stopwatch, memory_mb, row_metrics
from rft_platform.training.loop.training_run import TrainingRun
from rft_platform.training.models.loading import compiled_graphs
from rft_platform.training.models.optimizer import apply_step, clip_gradients, gradient_norm
from rft_platform.training.models.shards import local_part
from rft_platform.training.packed.flops import peak_flops
from rft_platform.training.protocol import StepEvent

Probe = Callable[[np.ndarray], bool]
"""``rows -> whether loss and gradient of these rows alone are finite``; the same answer on all ranks."""

_PROBES = 64


class OptimizerStep:
    """The update of ``run`` on some rows, after ``done`` steps of the same training.

    Every rank makes the same calls. A policy's version is the number of the project's optimiser steps when it was made.
    """

    def __init__(self, run: TrainingRun, rows: np.ndarray, done: int) -> None:
        self._run = run
        self._rows = rows
        self._version = run.request.counts_from + done
        self._steps_to_policy = run.request.parent_version + done  # rows are as old as they are behind the parent
        self._metrics: dict[str, float] = {}
        self._lap, self._cpu = Stopwatch(), time.process_time()
        self._clock = DeviceClock(run.ranks.device)
        self._graphs = compiled_graphs()

    @property
    def trains_policy(self) -> bool:
        """Whether the step trains the policy: False while the critic warms up and is trained alone."""
        return not critic_alone(self._run.state.critic, self._run.request.algorithm.critic)

    def accumulate_gradients(self) -> None:
        """Add the gradient of the step's loss to the policy: log-probs, loss and backward pass, pack by pack."""
        with self._lap.time("forward_backward"):
            self._metrics |= self._accumulate(clock=self._clock)

    def update_policy(self) -> None:
        """Clip the gradient and apply AdamW. Raises NonFiniteError if loss or gradient are not finite."""
        state, spec = self._run.state, self._run.request.optimizer
        with self._lap.time("optimizer"):
            norm = clip_gradients(state.policy.parameters(), spec.clip_grad)
            if not (math.isfinite(norm) and math.isfinite(self._metrics["loss"])):
                raise NonFiniteError(self._explain_refusal(norm, self._metrics["loss"]))
            rate = apply_step(state.optimizer, spec, self._version)
        self._metrics |= {"lr": rate, "grad_norm": norm}

    def update_critic(self) -> None:
        """Train the critic on the same rows, if there is one. Raises NonFiniteError like ``update_policy``."""
        run, critic, spec = self._run, self._run.state.critic, self._run.request.algorithm.critic
        if critic is None:
            return
        assert spec is not None, "if the algorithm has a critic, the state has one"
        with self._lap.time("critic"):
            self._metrics |= step_critic(
                critic,
                spec,
                [run.plan.rows.samples[row] for row in run.share(self._rows)],
                step=self._version,
                max_tokens_per_pack=run.request.max_tokens_per_pack,
                reduce=run.ranks.reduce,
                world_size=run.ranks.world_size,
            )
        self._metrics["critic_seconds"] = self._lap.seconds["critic"]

    def event(self) -> StepEvent:
        """Return the progress report with all metrics of the step. Call it once, at the end of the step."""
        run = self._run
        run.watch.add(self._lap)
        if "grad_norm" not in self._metrics:  # only the critic was trained
            self._metrics = self._sizes() | self._metrics
        metrics = {
            **self._metrics,
            **run.precomputed,
            **row_metrics(run.plan.rows, self._rows, self._steps_to_policy),
            **self._speed(),
            "cpu_seconds": run.ranks.total(time.process_time() - self._cpu),
            "compilations": float(compiled_graphs() - self._graphs),
        }
        return StepEvent(self._version + 1, metrics)

    def _sizes(self) -> dict[str, float]:
        """Metrics of a step that trains only the critic."""
        samples = [self._run.plan.rows.samples[row] for row in self._rows]
        return {
            "rows": float(len(samples)),
            "tokens": float(sum(np.count_nonzero(sample.loss_mask) for sample in samples)),
            "tokens_unpacked": float(sum(len(sample.token_ids) for sample in samples)),
            "lr": 0.0,
        }

    def _accumulate(self, part: np.ndarray | None = None, clock: DeviceClock | None = None) -> dict[str, float]:
        """Add the gradient of the step's rows, or only of those in ``part``.

        An error may be of this rank only: the other ranks then wait for it in a collective operation, which only the
        end of this process interrupts. With several ranks an RftError is therefore raised as a RuntimeError.
        """
        ranks = self._run.ranks
        mine = self._run.share(self._rows)
        rows = mine if part is None else mine[np.isin(mine, part)]
        try:
            return accumulate_gradients(
                self._run.state.policy,
                [self._run.plan.rows.samples[row] for row in rows],
                self._run.request.algorithm.at_step(self._version),
                max_tokens_per_pack=self._run.request.max_tokens_per_pack,
                reduce=ranks.reduce,
                world_size=ranks.world_size,
                clock=clock,
                teacher=self._run.teacher,
            )
        except RftError as error:
            if ranks.world_size == 1:
                raise
            raise RuntimeError(str(error)) from error

    def _speed(self) -> dict[str, float]:
        """Timings, throughput and memory. Device timings and memory are the maximum over the ranks."""
        ranks, lap, seconds = self._run.ranks, self._lap, sum(self._lap.seconds.values())
        own = {f"{name}_seconds": value for name, value in self._clock.seconds().items()} | memory_mb(ranks.device)
        largest = ranks.reduce(torch.tensor(list(own.values()), dtype=torch.float64), "max").tolist()
        peak = ranks.world_size * peak_flops(ranks.device, self._run.state.policy.compute_dtype)
        return {
            "tokens_per_s": self._metrics["tokens_unpacked"] / seconds,
            "mfu": self._metrics.get("flops", 0.0) / (seconds * peak),
            "step_seconds": seconds,
            "forward_backward_seconds": lap.seconds["forward_backward"],
            "optimizer_seconds": lap.seconds["optimizer"],
            **dict(zip(own, largest, strict=True)),
        }

    def _explain_refusal(self, norm: float, loss: float) -> str:
        """Error message for a refused step. It names rows and parameters that are not finite."""
        policy, rows = self._run.state.policy, self._run.plan.rows
        chosen = self._rows

        def is_finite(part: np.ndarray) -> bool:
            policy.zero_grad()
            alone = self._accumulate(part)["loss"]
            return math.isfinite(alone) and math.isfinite(gradient_norm(policy.parameters()))

        whole = self._run.plan.objective.policy_loss.whole_groups
        units = [chosen[rows.group[chosen] == g] for g in np.unique(rows.group[chosen])] if whole else chosen[:, None]
        found = culprits(list(units), is_finite)
        is_finite(found[0] if found else chosen)
        gradients = not_finite(((name, p.grad) for name, p in policy.model.named_parameters()), self._run.ranks.reduce)
        weights = not_finite(policy.model.named_parameters(), self._run.ranks.reduce)
        policy.zero_grad()
        ids = [rows.samples[row].row_id for row in (np.concatenate(found) if found else chosen)]
        who = "rows that are not finite even alone" if found else "no row is at fault alone; the step's rows"
        return (
            f"step {self._version + 1} was refused: loss {loss}, gradient norm {norm}; {who}: {some(ids)}; parameters "
            f"whose gradient is not finite: {some(gradients)}; whose weights are not: {some(weights)}. "
            "Lower the learning rate or check these rows"
        )


def culprits(units: Sequence[np.ndarray], is_finite: Probe) -> list[np.ndarray]:
    """Return up to five ``units`` (rows that are evaluated together) whose loss or gradient alone is not finite.

    Every rank gets the same answers from ``is_finite``, so all ranks bisect in the same way. To find one such unit
    among n takes about 2 log2(n) probes, which together cost as much as two steps. The list is empty if each unit
    alone is finite and only their sum overflows.
    """
    found: list[np.ndarray] = []
    parts = [list(units)]
    for _ in range(_PROBES):
        if not parts or len(found) == NAMED:
            break
        part = parts.pop()
        if is_finite(np.concatenate(part)):
            continue
        if len(part) == 1:
            found.append(part[0])
        else:
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
    return found


def not_finite(tensors: Iterable[tuple[str, Tensor | None]], reduce: Reduce) -> list[str]:
    """Return the names of tensors that hold a NaN or an infinity on any rank. Every rank must pass the same names."""
    named = list(tensors)
    bad = [0.0 if value is None or torch.isfinite(local_part(value)).all() else 1.0 for _, value in named]
    anywhere = reduce(torch.tensor(bad, dtype=torch.float64), "max").tolist()
    return [name for (name, _), is_bad in zip(named, anywhere, strict=True) if is_bad]
