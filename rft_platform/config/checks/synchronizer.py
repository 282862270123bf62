"""Check section ``synchronizer``: refuse settings with which no row or no step could ever be trained."""

from collections.abc import Iterator

from rft_platform.config.resolve import RunSettings


def sync_problems(run: RunSettings) -> Iterator[str]:
    """One line for each synchronisation setting that cannot work."""
    yield from _dynamic_problems(run) if run.batches.dynamic else _fixed_problems(run)


def _fixed_problems(run: RunSettings) -> Iterator[str]:
    sync, limit = run.config.synchronizer, run.config.synchronizer.max_staleness
    old = sync.offset_rounds * run.batches.steps_a_round
    if limit is not None and run.batches.exact and old > limit:
        yield (
            f"synchronizer.max_staleness is {limit}: with sync_offset {sync.sync_offset} the rows of a round are {old} "
            f"policy versions old when they train, so all would be dropped; set it to {old} or more"
        )


def _dynamic_problems(run: RunSettings) -> Iterator[str]:
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
        yield (
            f"{setting} is never reached: the whole run explores {length.rounds} batches of {plan.experiences_a_round} "
            "experiences; set it lower, or explore more"
        )
    elif sync.sync_offset and needed > sync.sync_offset * plan.experiences_a_round:
        least = -(-needed // plan.experiences_a_round)
        yield (
            f"{setting} is never reached: the explorer waits when synchronizer.sync_offset "
            f"{sync.sync_offset} batches of "
            f"{plan.experiences_a_round} experiences are stored; set it to {least} or more, or to 0 (no bound)"
        )
