"""Replay: which groups may be trained on again, and their order of priority.

The use count of a group follows from the row selections of past trainings, so no second store has to stay in sync.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

from rft_platform.config.buffer import ReplayBuffer
from rft_platform.errors import UserError
from rft_platform.experience.selections import TRAINED_ON, read_selection
from rft_platform.rounds.groups import Group, groups_of, split_stale
from rft_platform.rounds.landing import newest, selection_note
from rft_platform.rounds.policy import published
from rft_platform.rounds.project import Project
from rft_platform.user_code import load_object

#: Arguments: the policy version that sampled a group, its number of uses, and ``priority_fn_args.decay``.
Priority = Callable[..., float]


def linear_decay(model_version: int, use_count: int, decay: float) -> float:
    """``model_version - decay * use_count``: newer weights first; each use costs ``decay`` versions."""
    return model_version - decay * use_count


_BUILT_IN: dict[str, Priority] = {"linear_decay": linear_decay}


def priority_of(settings: ReplayBuffer) -> Callable[[Group], float]:
    """The configured priority function of a group. Raises UserError if it does not exist."""
    name = settings.priority_fn
    if name not in _BUILT_IN and ":" not in name:
        raise UserError(
            f"replay_buffer.priority_fn {name!r}: expected one of {', '.join(_BUILT_IN)}, or a function of yours as "
            "package.module:attribute or path/to/file.py:attribute"
        )
    function = _BUILT_IN.get(name) or cast(Priority, load_object(name, "replay_buffer.priority_fn"))
    decay = settings.priority_fn_args.decay
    return lambda group: float(function(model_version=group.policy_version, use_count=group.uses, decay=decay))


def in_order(groups: list[Group], priority: Callable[[Group], float]) -> list[Group]:
    """Sort by descending priority; ties by fewest uses, then by oldest round."""
    return sorted(groups, key=lambda group: (-priority(group), group.uses, group.round))


def used_groups(project: Project, number: int) -> list[Group]:
    """Groups that were trained on before training ``number`` and may be used again now.

    Excludes groups of retired rounds and groups used less than ``reuse_cooldown_time`` seconds ago.
    """
    settings, store = project.config.buffer.trainer_input.experience_buffer.replay_buffer, project.store
    uses: Counter[tuple[int, str]] = Counter()
    resting: set[tuple[int, str]] = set()
    for training, settled_at in _trainings(project, number):
        table = read_selection(store, training, ["round", "group_id", "use"]).to_pylist()
        taken = {(row["round"], row["group_id"]) for row in table if row["use"] in TRAINED_ON}
        uses.update(taken)
        passed = time.time() - settled_at
        if settings.reuse_cooldown_time is not None and 0 <= passed < settings.reuse_cooldown_time:
            resting |= taken
    rounds = [n for n in sorted({n for n, _ in uses}) if not store.ledger(n).read().retired]
    groups = [group for n in rounds for group in groups_of(store, n) if group.key in uses and group.kept]
    return [replace(group, uses=uses[group.key]) for group in groups if group.key not in resting]


def replayable_rows(project: Project, number: int) -> int:
    """Rows that training ``number`` may use again now, without those too old for it; 0 if replay is off."""
    if not project.config.buffer.trainer_input.experience_buffer.replay_buffer.enable:
        return 0
    limit = project.config.synchronizer.max_staleness
    young, _ = split_stale(used_groups(project, number), _version_before(project, number), limit)
    return sum(len(group.kept) for group in young)


def _version_before(project: Project, number: int) -> int:
    """The policy version that training ``number`` starts from, also while the training before it is running."""
    before = published(project.store, number - 1)
    if before is not None:
        return before.policy_version
    note = selection_note(project.store, number - 1) or {}
    return int(note.get("parent_version", 0)) + int(note.get("steps", 0))


def _trainings(project: Project, before: int) -> Iterator[tuple[int, float]]:
    """The trainings before ``before`` that have settled their rows, each with the time."""
    for number in range(1, min(before, newest(project.store) + 1)):
        note = selection_note(project.store, number)
        if note is not None:
            yield number, note["settled_at"]
