"""The arithmetic from tasks to optimiser steps, in one place."""

from dataclasses import dataclass
from typing import Protocol

from rft_platform.config.schema import RftConfig

#: More experiences than a round can have: what a step takes where it takes a whole round.
WHOLE_ROUND = 2**31 - 1


class PresetFacts(Protocol):
    """What the configuration needs to know of an algorithm's preset."""

    @property
    def advantage(self) -> str | None:
        """Name of the advantage that is made when a round is judged; None where there is none."""
        ...

    @property
    def trains_on(self) -> str:
        """``rollouts``, ``demonstrations`` or ``preferences``."""
        ...

    @property
    def token_advantage(self) -> str | None:
        """Name of the advantage that the trainer makes; None where there is none."""
        ...

    @property
    def teacher(self) -> bool:
        """Whether it learns from a teacher's distribution."""
        ...

    @property
    def needs_reward(self) -> bool:
        """Whether it learns from rewards."""
        ...

    @property
    def critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        ...

    @property
    def experts(self) -> bool:
        """Whether demonstrations are mixed in among the rollouts."""
        ...

    @property
    def loss_agg_mode(self) -> str:
        """How per-token losses become one."""
        ...

    @property
    def overlong_penalty(self) -> float:
        """Weight of the soft over-long penalty in the reward."""
        ...

    @property
    def drop_zero_variance(self) -> bool:
        """Whether groups whose runs all have the same reward are kept from training."""
        ...

    @property
    def max_batches(self) -> int:
        """Batches of tasks that may be sampled for one, groups without signal being replaced."""
        ...

    @property
    def min_group(self) -> int:
        """Fewest runs of a task."""
        ...

    @property
    def repeat_times(self) -> int:
        """Runs of a task where the configuration gives no number."""
        ...


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How tasks become experiences and experiences become optimiser steps.

    ``exact`` says that every run is one experience; a workflow of several model calls gives at least the experiences
    that are counted here, and so at least the steps.
    """

    batch_size: int  # tasks an explore batch
    repeat_times: int  # runs of a task
    batches_a_round: int
    experiences_a_round: int
    train_batch_size: int  # experiences an optimiser step
    steps_a_round: int
    exact: bool
    rounds: int | None  # None: it takes the number of tasks to know
    total_steps: int | None  # optimiser steps of the whole run
    whole_round: bool = False  # a round is one optimiser step, however many experiences it has
    dynamic: bool = False  # a step takes what has landed, of whatever rounds
    max_batches: int = 1  # batches of tasks that may be sampled for an explore batch (dynamic sampling)


def batch_plan(config: RftConfig, preset: PresetFacts, task_count: int | None = None) -> BatchPlan:
    """The arithmetic of a configuration. ``task_count`` is needed where the run's length is given in epochs."""
    buffer, taskset = config.buffer, config.buffer.explorer_input.taskset
    repeat_times = config.algorithm.repeat_times or preset.repeat_times
    batches = config.synchronizer.batches_a_round
    experiences = buffer.batch_size * repeat_times * batches
    train_batch_size = buffer.batch_size * repeat_times
    if buffer.train_batch_size == "round":
        train_batch_size = experiences
    elif buffer.train_batch_size is not None:
        train_batch_size = buffer.train_batch_size * config.trainer.gradient_accumulation_steps
    steps = -(-experiences // train_batch_size)
    known = buffer.total_steps is not None or task_count is not None
    rounds = config.rounds_budget(task_count) if known else None
    total = None if rounds is None else run_steps(config, rounds, experiences, train_batch_size)
    if config.trainer.total_steps is not None:
        total = min(total or config.trainer.total_steps, config.trainer.total_steps)
    return BatchPlan(
        batch_size=buffer.batch_size,
        repeat_times=repeat_times,
        batches_a_round=batches,
        experiences_a_round=experiences,
        train_batch_size=train_batch_size,
        steps_a_round=steps,
        exact=taskset is None or taskset.workflow == "single_turn",
        rounds=rounds,
        total_steps=total,
        whole_round=buffer.train_batch_size == "round",
        dynamic=config.synchronizer.dynamic,
        max_batches=max_batches(config, preset),
    )


def max_batches(config: RftConfig, preset: PresetFacts) -> int:
    """Batches of tasks that may be sampled for one, groups without signal being replaced; 1: none is."""
    operators = config.data_processor.experience_pipeline.operators
    given = [entry.args.get("max_batches", 1) for entry in operators if entry.name == "dynamic_sampling"]
    if given:
        return max((value for value in given if isinstance(value, int)), default=1)
    return preset.max_batches if preset.drop_zero_variance else 1


def run_steps(config: RftConfig, rounds: int, experiences_a_round: int, train_batch_size: int) -> int:
    """Optimiser steps of a run in which no row is dropped; in the dynamic styles about so many."""
    if config.synchronizer.dynamic:
        return -(-rounds * experiences_a_round // train_batch_size)
    return rounds * -(-experiences_a_round // train_batch_size)
