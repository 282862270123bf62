"""Decisions of the dynamic sync styles: when enough rows have landed to train, and when exploration must wait.

Pure functions of the project's state, called by ``plan_next``.
"""

import math

from rft_platform.experience.file_names import round_key
from rft_platform.rounds.planning.state import ProjectState


def held_back(state: ProjectState, number: int) -> str | None:
    """The reason why batch ``number`` must not be explored before the next training; None if it may be explored.

    Exploration waits only while there are rows to train on or a training is running, so it cannot wait forever.
    """
    landed, key = state.landed, round_key(number)
    if state.offset_rounds and landed.rounds >= state.offset_rounds:
        batches = "1 batch has" if landed.rounds == 1 else f"{landed.rounds} batches have"
        return f"{key} explores after a training: {batches} landed without a training (synchronizer.sync_offset)"
    if state.max_staleness is None or not (landed.rounds or landed.training_steps):
        return None
    ahead = versions_ahead(state)
    if ahead <= state.max_staleness:
        return None
    return (
        f"{key} explores after a training: its rows would train {ahead} policy versions after they were sampled "
        f"(synchronizer.max_staleness {state.max_staleness})"
    )


def versions_ahead(state: ProjectState) -> int:
    """How many policy versions training may advance before it uses the rows of a batch that is explored now."""
    landed, step = state.landed, max(1, state.rows_a_step)
    if state.sync_style == "dynamic_by_trainer":  # fixed-size trainings, up to the one with the last row
        steps_a_unit = max(1, state.rows_wanted // step)
        units = (landed.rows + state.experiences_needed - 1) // max(1, state.rows_wanted)
        return landed.training_steps + steps_a_unit * units
    return landed.training_steps + (math.ceil(landed.rows / step) if has_enough(state) else 0)


def has_enough(state: ProjectState) -> bool:
    """Whether the landed rows, with the replayable ones, are enough for a training."""
    landed = state.landed
    return landed.rounds > 0 and landed.rows + landed.replayable >= state.rows_wanted


def trains(state: ProjectState, number: int, explored: int) -> bool | str:
    """Whether training ``number`` may start after ``explored`` batches; a str: what it waits for; False: it is done.

    If its rows are selected already (``settled``), the training continues as soon as these rows are stored again.
    """
    landed, key, over = state.landed, round_key(number), explored >= state.rounds_budget
    if number <= landed.settled:
        missing = [n for n in landed.taken if n > explored and number == landed.settled]
        return f"{key} trains when {round_key(missing[0])} is explored again" if missing else True
    if not landed.rounds:
        return False if over else f"{key} waits: 0 of {state.rows_wanted} experiences have landed"
    if has_enough(state) or over or _stopped(state, explored + 1):
        return True
    return f"{key} waits: {landed.rows} of {state.rows_wanted} experiences have landed"


def _stopped(state: ProjectState, number: int) -> bool:
    """Whether exploration waits for the next training. That training then starts with less than a full step."""
    running = number <= len(state.rounds) and state.rounds[number - 1].explore.running
    return not running and held_back(state, number) is not None
