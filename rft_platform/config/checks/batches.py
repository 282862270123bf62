"""Check the settings that turn tasks into batches, rounds and optimiser steps."""

from collections.abc import Iterator

from rft_platform.algorithms.presets import Preset
from rft_platform.config.findings import Finding, error
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.rft_config import RftConfig


def batch_problems(run: RunSettings) -> Iterator[Finding]:
    """Batch sizes and training settings that contradict each other."""
    config, preset, plan = run.config, run.algorithm, run.batches
    if config.buffer.train_batch_size == "round":
        yield from _whole_round_problems(config, preset)
    if config.mode == "train" and config.buffer.train_batch_size is None:
        yield error("buffer.train_batch_size is not set: mode train explores nothing, so it has no default; set it")
    if not config.explores:
        return
    if plan.repeat_times < preset.min_group:
        yield error(
            f"algorithm.repeat_times is {plan.repeat_times}: {config.algorithm.algorithm_type} compares the runs "
            f"of a task, so one run gives no signal; set it to {max(preset.min_group, preset.repeat_times)}"
        )
    yield from _sync_problems(run)
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer.enable  # fills short steps
    if config.synchronizer.dynamic or replay or not plan.exact:
        return
    product = (
        f"batch_size {plan.batch_size} * repeat_times {plan.repeat_times} * sync_interval {plan.batches_a_round} "
        f"= {plan.experiences_a_round}"
    )
    if plan.whole_round:
        return
    if plan.train_batch_size > plan.experiences_a_round:
        yield error(
            f"buffer.train_batch_size {plan.train_batch_size} is never reached: a round has {product} "
            f"experiences; set it to {plan.experiences_a_round} or a divisor of that"
        )
    elif plan.experiences_a_round % plan.train_batch_size:
        yield error(
            f"buffer.train_batch_size {plan.train_batch_size} does not divide the experiences of a round, {product}: "
            f"the last step would be smaller; set it to {_divisor(plan.experiences_a_round, plan.train_batch_size)}"
        )


def _whole_round_problems(config: RftConfig, preset: Preset) -> Iterator[Finding]:
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    counted = {
        f"mode {config.mode} explores no rounds": config.mode == "train",
        f"synchronizer.sync_style {config.synchronizer.sync_style} trains as soon as the rows of a step are stored": (
            config.synchronizer.dynamic
        ),
        "the replay buffer fills steps to a fixed size": replay,
        "demonstrations are a fixed share of a step": preset.experts
        and (config.algorithm.experts is None or config.algorithm.experts.batch_size is None),
    }
    why = [reason for reason, holds in counted.items() if holds]
    if why:
        yield error(f"buffer.train_batch_size round: {', and '.join(why)}; give the number of experiences of a step")


def _divisor(total: int, near: int) -> int:
    """The divisor of ``total`` nearest to ``near``."""
    return min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - near))


def in_flight_problems(run: RunSettings) -> Iterator[Finding]:
    """Settings that ``explorer.batches_in_flight`` above 1 cannot be used with."""
    config = run.config
    if run.batches.in_flight == 1:
        return
    inputs = config.buffer.explorer_input
    against = {
        "it holds for the workflow single_turn alone": any(
            taskset.workflow != "single_turn" for taskset in inputs.explored.values()
        ),
        "it needs a single taskset": len(inputs.explored) > 1,
        "it needs a single policy": bool(config.policies),
        "dynamic sampling takes further batches itself": run.batches.max_batches > 1,
        f"{config.algorithm.algorithm_type} decodes a greedy answer": run.batches.baseline_runs > 0,
        "production traffic explores no batches": bool(config.online),
    }
    if why := [reason for reason, holds in against.items() if holds]:
        yield error(f"explorer.batches_in_flight {run.batches.in_flight}: {', and '.join(why)}; leave it out")
    limit, old = config.synchronizer.max_staleness, _age(run, 1)
    one_batch = run.batches.batches_a_round == 1  # those of a round continue on the same weights
    if not run.batches.dynamic and run.batches.exact and one_batch and limit is not None and old > limit:
        yield error(
            f"explorer.batches_in_flight {run.batches.in_flight} with synchronizer.max_staleness {limit}: a continued "
            f"answer is at least {old} policy versions old when it trains; set max_staleness to {old} or more, or "
            "leave batches_in_flight out"
        )


def _sync_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each synchronisation setting that cannot work."""
    yield from _dynamic_problems(run) if run.batches.dynamic else _fixed_problems(run)


def _age(run: RunSettings, rounds: int = 0) -> int:
    """Style ``fixed``: the age in policy versions, when its round trains, of a token sampled ``rounds`` before it."""
    return (run.config.synchronizer.offset_rounds + rounds) * run.batches.steps_a_round


def _fixed_problems(run: RunSettings) -> Iterator[Finding]:
    sync, limit = run.config.synchronizer, run.config.synchronizer.max_staleness
    old = _age(run)
    if limit is not None and run.batches.exact and old > limit:
        yield error(
            f"synchronizer.max_staleness is {limit}: with sync_offset {sync.sync_offset} the rows of a round are {old} "
            f"policy versions old when they train, so all would be dropped; set it to {old} or more"
        )


def _dynamic_problems(run: RunSettings) -> Iterator[Finding]:
    """Check the dynamic styles. Skipped if a run can have several experiences: then their number is unknown."""
    sync, plan, length = run.config.synchronizer, run.batches, run.length()
    by_trainer = sync.sync_style == "dynamic_by_trainer"
    needed = plan.train_batch_size * (sync.sync_interval if by_trainer else 1)
    setting = f"buffer.train_batch_size {plan.train_batch_size}" + (
        f" * synchronizer.sync_interval {sync.sync_interval} = {needed}" if by_trainer else ""
    )
    replay = run.config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    if not plan.exact or plan.whole_round or replay:
        return
    if length is not None and needed > length.rounds * plan.experiences_a_round:
        yield error(
            f"{setting} is never reached: the whole run explores {length.rounds} batches of {plan.experiences_a_round} "
            "experiences; set it lower, or explore more"
        )
    elif sync.sync_offset and needed > sync.sync_offset * plan.experiences_a_round:
        least = -(-needed // plan.experiences_a_round)
        yield error(
            f"{setting} is never reached: the explorer waits when synchronizer.sync_offset "
            f"{sync.sync_offset} batches of "
            f"{plan.experiences_a_round} experiences are stored; set it to {least} or more, or to 0 (no bound)"
        )
