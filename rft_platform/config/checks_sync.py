"""Faults of section ``synchronizer`` that the types cannot show, each with its fix."""

from collections.abc import Iterator

from rft_platform.config.batches import BatchPlan
from rft_platform.config.schema import RftConfig


def sync_problems(config: RftConfig, plan: BatchPlan) -> Iterator[str]:
    """One line for each setting of how explorer and trainer keep step that cannot work."""
    yield from _dynamic_problems(config, plan) if config.synchronizer.dynamic else _fixed_problems(config, plan)


def _fixed_problems(config: RftConfig, plan: BatchPlan) -> Iterator[str]:
    sync, limit = config.synchronizer, config.synchronizer.max_staleness
    old = sync.offset_rounds * plan.steps_a_round
    if limit is not None and plan.exact and old > limit:
        yield (
            f"synchronizer.max_staleness is {limit}: with sync_offset {sync.sync_offset} the rows of a round are {old} "
            f"policy versions old when they train, and all would be left out; set it to {old} or more"
        )


def _dynamic_problems(config: RftConfig, plan: BatchPlan) -> Iterator[str]:
    """Where every run is one experience it can be told how many there will be."""
    sync = config.synchronizer
    by_trainer = sync.sync_style == "dynamic_by_trainer"
    wanted = plan.train_batch_size * (sync.sync_interval if by_trainer else 1)
    said = f"buffer.train_batch_size {plan.train_batch_size}" + (
        f" * synchronizer.sync_interval {sync.sync_interval} = {wanted}" if by_trainer else ""
    )
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    if not plan.exact or replay:
        return
    if plan.rounds is not None and wanted > plan.rounds * plan.experiences_a_round:
        yield (
            f"{said} can never fill: the whole run explores {plan.rounds} batches of {plan.experiences_a_round} "
            "experiences; set it lower, or explore more"
        )
    elif sync.sync_offset and wanted > sync.sync_offset * plan.experiences_a_round:
        least = -(-wanted // plan.experiences_a_round)
        yield (
            f"{said} can never fill: the explorer waits when synchronizer.sync_offset {sync.sync_offset} batches of "
            f"{plan.experiences_a_round} experiences have landed; set it to {least} or more, or to 0 (no bound)"
        )
