"""Resolve a configuration into the settings of a run.

Only this module merges an algorithm's preset with the keys that override its parts, computes batch sizes, and counts
rounds and optimiser steps. Checks, dry run, driver, assets and stages read the result.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from rft_platform.algorithms.plugins import import_plugins
from rft_platform.algorithms.presets import Preset, choose
from rft_platform.algorithms.spec import AlgorithmSpec, LoraSpec
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.rollout_limits import Patience, RolloutLimits
from rft_platform.config.schema.algorithm import Optimizer
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.config.training_specs import algorithm_spec, lora_spec

#: Trainings on an existing dataset (mode train) instead of explored rows.
OfflineKind = Literal["sft", "dpo", "distill"]
#: Rounds of an online run without a limit.
UNLIMITED_ROUNDS = 10**6
#: ``Batches.train_batch_size`` if an optimiser step takes a whole round; larger than any number of experiences.
WHOLE_ROUND = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Batches:
    """How tasks become experiences, and experiences become optimiser steps.

    The counts assume that no run fails. They are exact if every run is one experience. For a workflow with several
    model calls they are lower bounds.
    """

    batch_size: int  # tasks per explore batch
    repeat_times: int  # runs per task, with those that are only a baseline
    batches_a_round: int
    train_batch_size: int  # experiences per optimiser step; ``WHOLE_ROUND``: all experiences of the round
    exact: bool
    dynamic: bool  # True: a step takes stored and judged rows of any round
    max_batches: int  # dynamic sampling: maximum task batches for one explore batch; 1: no further batches
    epochs: int = 1  # passes over the experiences of a round
    baseline_runs: int = 0  # runs of each task that are not trained on
    in_flight: int = 1  # explore batches that are sampled at the same time

    @property
    def groups_a_round(self) -> int:
        """Tasks of a round; each task gives one group."""
        return self.batch_size * self.batches_a_round

    @property
    def experiences_a_round(self) -> int:
        """Trained runs per round, which is the number of experiences if every run is one experience."""
        return self.groups_a_round * (self.repeat_times - self.baseline_runs)

    @property
    def whole_round(self) -> bool:
        """Whether a round is one optimiser step, independent of its number of experiences."""
        return self.train_batch_size == WHOLE_ROUND

    @property
    def steps_a_round(self) -> int:
        """Optimiser steps per round."""
        return self.epochs * -(-self.experiences_a_round // self.train_batch_size)

    def steps(self, rounds: int) -> int:
        """Optimiser steps of ``rounds`` rounds; approximate in the dynamic styles."""
        if self.dynamic:
            return -(-rounds * self.experiences_a_round // self.train_batch_size)
        return rounds * self.steps_a_round

    def rounds(self, steps: int) -> int:
        """Number of rounds needed for ``steps`` optimiser steps."""
        if self.dynamic:
            return -(-steps * self.train_batch_size // self.experiences_a_round)
        return -(-steps // self.steps_a_round)


@dataclass(frozen=True, slots=True)
class RunLength:
    """Length of a run in which no row is dropped."""

    rounds: int
    steps: int


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """A policy of the run: that of section ``model``, or one of section ``policies``."""

    model_path: str  # starting weights
    key: str  # configuration key that sets ``model_path``
    train: bool = True


def policies_of(config: RftConfig) -> dict[str, PolicySettings]:
    """The policies of a run by name, the first one first."""
    first = PolicySettings(config.model.model_path, "model.model_path")
    others = (
        (each.name, PolicySettings(each.model_path, f"policies ({each.name}).model_path", each.train))
        for each in config.policies
    )
    return {DEFAULT_POLICY: first, **dict(others)}


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run: its configuration and everything derived from it."""

    config: RftConfig
    algorithm: Preset  # preset of ``algorithm_type``, with the overrides of the configuration
    spec: AlgorithmSpec  # the algorithm in the form that the trainer receives
    lora: LoraSpec | None  # the adapter to train; None: the full weights
    offline: OfflineKind | None  # None: the run explores and trains in rounds
    batches: Batches
    limits: RolloutLimits

    def length(self, task_count: int | None = None) -> RunLength | None:
        """Rounds and optimiser steps of a run that explores; None if they depend on an unknown number of tasks.

        The run ends after ``buffer.total_steps`` explore batches (or ``buffer.total_epochs`` passes over the tasks), or
        earlier with the round that reaches ``trainer.total_steps``. An online run has no other end.
        """
        buffer, end = self.config.buffer, self.config.trainer.total_steps
        explored = buffer.total_steps
        if explored is None and self.config.online:
            explored = UNLIMITED_ROUNDS
        if explored is None:
            if task_count is None:
                return None
            explored = math.ceil(buffer.total_epochs * task_count / buffer.batch_size)
        rounds = math.ceil(explored / self.batches.batches_a_round)
        if end is not None:
            rounds = min(rounds, self.batches.rounds(end))
        return RunLength(rounds, self.batches.steps(rounds))

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The sections with the optimisers of the training, by key."""
        settings = self.config.algorithm
        critic = {"algorithm.critic": settings.critic} if self.algorithm.critic else {}
        return {"algorithm.optimizer": settings.optimizer, **critic}

    @property
    def critic_only_steps(self) -> int:
        """Optimiser steps at the start that train only the critic; the policy's learning-rate schedule follows them."""
        return 0 if self.spec.critic is None else self.spec.critic.warmup_steps

    def offline_steps(self, rows: int) -> int:
        """Number of optimiser steps of an offline training on a dataset with this number of rows."""
        given, passes = self.config.offline_steps, self.config.buffer.total_epochs
        return given or math.ceil(passes * rows / self.batches.train_batch_size)


def offline_kind(config: RftConfig, preset: Preset) -> OfflineKind | None:
    """The kind of offline training that the configuration requests; None: the run trains on explored rounds.

    ``gkd`` supports both: with mode train and a dataset, it trains offline on that dataset.
    """
    if config.mode != "train":
        return None
    if preset.trains_on == "preferences":
        return "dpo"
    distils = preset.teacher and preset.token_advantage is None
    if preset.trains_on == "demonstrations":
        return "distill" if distils else "sft"
    return "distill" if distils and config.buffer.trainer_input.experience_buffer.path is not None else None


def offline_without_plugins(config: RftConfig) -> OfflineKind | None:
    """``RunSettings.offline`` of ``config``, for a process that must not import the project's plugins.

    Raises UserError for an unknown ``algorithm_type``.
    """
    return offline_kind(config, choose(config.algorithm.algorithm_type))


def resolve(config: RftConfig) -> RunSettings:
    """Resolve ``config`` and import its plugins. Raises UserError for unknown algorithm parts or options."""
    algorithm = _algorithm(config)
    return RunSettings(
        config=config,
        algorithm=algorithm,
        spec=algorithm_spec(config, algorithm),
        lora=lora_spec(config),
        offline=offline_kind(config, algorithm),
        batches=_batches(config, algorithm),
        limits=_limits(config),
    )


def _algorithm(config: RftConfig) -> Preset:
    settings, filters = config.algorithm, config.algorithm.filters
    import_plugins(settings.plugins)
    chosen = choose(
        settings.algorithm_type,
        advantage=settings.advantage_fn,
        advantage_args=settings.advantage_fn_args,
        policy_loss=settings.policy_loss_fn,
        policy_loss_args=settings.policy_loss_fn_args,
        loss_agg_mode=settings.loss_agg_mode,
        correction=settings.rollout_correction.mode,
    )
    return replace(
        chosen,
        drop_zero_variance=chosen.drop_zero_variance if filters.zero_variance is None else filters.zero_variance,
        max_batches=filters.max_batches or chosen.max_batches,
        reward_threshold=chosen.reward_threshold if filters.reward_threshold is None else filters.reward_threshold,
        overlong_penalty=chosen.overlong_penalty if filters.overlong.weight is None else filters.overlong.weight,
    )


def _batches(config: RftConfig, algorithm: Preset) -> Batches:
    if config.online:
        return _online_batches(config)
    buffer, tasksets = config.buffer, config.buffer.explorer_input.explored.values()
    repeat_times = config.algorithm.repeat_times or algorithm.repeat_times
    if buffer.train_batch_size == "round":
        train_batch_size = WHOLE_ROUND
    elif buffer.train_batch_size is None:
        train_batch_size = buffer.batch_size * max(1, repeat_times - algorithm.greedy_run)
    else:
        train_batch_size = buffer.train_batch_size * config.trainer.gradient_accumulation_steps
    return Batches(
        batch_size=buffer.batch_size,
        repeat_times=repeat_times,
        batches_a_round=config.synchronizer.batches_a_round,
        train_batch_size=train_batch_size,
        exact=all(taskset.workflow == "single_turn" for taskset in tasksets),
        dynamic=config.synchronizer.dynamic,
        max_batches=_max_batches(config, algorithm),
        epochs=config.algorithm.epochs,
        baseline_runs=int(algorithm.greedy_run and repeat_times > 1),
        in_flight=config.explorer.batches_in_flight,
    )


def _online_batches(config: RftConfig) -> Batches:
    """A round takes the rows of ``sync_interval`` optimiser steps; a task has one run unless configured otherwise."""
    repeat_times, given = config.algorithm.repeat_times or 1, config.buffer.train_batch_size
    rows = given * config.trainer.gradient_accumulation_steps if isinstance(given, int) else config.buffer.batch_size
    return Batches(
        batch_size=math.ceil(rows / repeat_times),
        repeat_times=repeat_times,
        batches_a_round=config.synchronizer.batches_a_round,
        train_batch_size=WHOLE_ROUND if given == "round" else rows,
        exact=False,
        dynamic=False,
        max_batches=1,
        epochs=config.algorithm.epochs,
    )


def _max_batches(config: RftConfig, algorithm: Preset) -> int:
    operators = config.data_processor.experience_pipeline.operators
    limits = [entry.args.get("max_batches", 1) for entry in operators if entry.name == "dynamic_sampling"]
    if limits:
        return max((value for value in limits if isinstance(value, int)), default=1)
    return algorithm.max_batches if algorithm.drop_zero_variance else 1


def _limits(config: RftConfig) -> RolloutLimits:
    explorer = config.explorer
    over, dynamic = explorer.over_rollout, explorer.dynamic_timeout
    return RolloutLimits(
        concurrency=explorer.runner_per_model * explorer.rollout_model.engine_num,
        timeout_s=explorer.max_timeout,
        max_retries=explorer.max_retry_times,
        truncated_reward=explorer.truncated_reward,
        group_policy=explorer.group_policy,
        max_prompt_tokens=config.model.max_prompt_tokens,
        patience=Patience(dynamic.ratio if dynamic.enable else None, over.ratio, over.wait_after_min),
    )
