"""The dynamic styles, decided: when a training has enough of what landed, and when exploration must let it catch up.

Pure functions of the project's state; ``plan_next`` asks them.
"""

import math

from rft_platform.experience.rounds import round_key
from rft_platform.rounds.state import ProjectState


def held_back(state: ProjectState, number: int) -> str | None:
    """Why batch ``number`` must not be explored before something has trained, in words; None: it may be.

    It is held back only while there is something to train on, or a training is under way: so it never waits for ever.
    """
    landed, key = state.landed, round_key(number)
    if state.sync_offset and landed.rounds >= state.sync_offset:
        batches = "batch has" if landed.rounds == 1 else "batches have"
        return f"{key} explores after a training: {landed.rounds} {batches} landed untrained (synchronizer.sync_offset)"
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
    """Policy versions that training may move on before it starts on the rows of a batch that is explored now."""
    landed, step = state.landed, max(1, state.rows_a_step)
    if state.sync_style == "dynamic_by_trainer":  # units of a fixed size: where the batch's last row ends up
        steps_a_unit = max(1, state.rows_wanted // step)
        units = (landed.rows + state.experiences_needed - 1) // max(1, state.rows_wanted)
        return landed.training_steps + steps_a_unit * units
    return landed.training_steps + (math.ceil(landed.rows / step) if has_enough(state) else 0)


def has_enough(state: ProjectState) -> bool:
    """Whether what landed, with what may be used again, makes a training."""
    landed = state.landed
    return landed.rounds > 0 and landed.rows + landed.replayable >= state.rows_wanted


def trains(state: ProjectState, number: int, explored: int) -> bool | str:
    """Whether training ``number`` may start after ``explored`` batches; in words what it waits for; False: it is done.

    A training that was settled and is not complete goes on, once what it took is there.
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
    """Whether exploration stands still until something has trained: then a part of a step is trained."""
    running = number <= len(state.rounds) and state.rounds[number - 1].explore.running
    return not running and held_back(state, number) is not None
