"""The groups of a round as units of training, and replay: which groups may be trained on again, and in which order.

A group holds the runs of one task that are compared, with the policy version that sampled them. The use count of a
group follows from the row selections of past trainings, so no second store has to stay in sync.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from rft_platform.common.errors import StorageError, UserError
from rft_platform.common.user_code import load_object
from rft_platform.config.schema.buffer import ReplayBuffer
from rft_platform.experience.file_names import round_key
from rft_platform.experience.selections import TRAINED_ON, read_selection
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, published, read
from rft_platform.rounds.selection.pending_rows import newest

#: Arguments: the policy version that sampled a group, its number of uses, and ``priority_fn_args.decay``.
Priority = Callable[..., float]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are compared with each other and are therefore trained on together."""

    round: int
    group_id: str
    judge_version: str
    policy_version: int
    kept: tuple[str, ...]  # ids of rows that no filter dropped
    filtered: tuple[str, ...]
    uses: int = 0  # number of trainings that used the group

    @property
    def key(self) -> tuple[int, str]:
        """Unique key of the group within the project."""
        return self.round, self.group_id


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


def by_priority(groups: list[Group], priority: Callable[[Group], float]) -> list[Group]:
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
    """Number of rows that training ``number`` may use again now, without too old rows; 0 if replay is off."""
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
    running = read(project.store, number - 1).selection()
    return 0 if running is None else running.parent_version + running.steps


def _trainings(project: Project, before: int) -> Iterator[tuple[int, float]]:
    """The number of each training before ``before`` with a recorded row selection, and the time of the record."""
    for number in range(1, min(before, newest(project.store) + 1)):
        selection = read(project.store, number).selection()
        if selection is not None:
            yield number, selection.settled_at


def groups_of(store: ExperienceStore, number: int, snapshot: Policy | None = None) -> list[Group]:
    """The groups of a round by its active judgement, in row order.

    With the ``snapshot`` of a policy, the groups contain only the rows of that policy.

    Raises StorageError if the round is not explored and judged.
    """
    explored, judge_version = read(store, number).explored, store.judge_version(number)
    if explored is None or judge_version is None:
        key, job = round_key(number), "explore_job" if explored is None else "judge_job"
        raise StorageError(f"{key} has no judgement in force to train on: launch {job} for {key}")
    rows = store.read_judged(number, judge_version, columns=["row_id", "group_id", "dropped_by"]).to_pylist()
    version = explored.policy_version
    if snapshot is not None:
        version = snapshot.policy_version
        called = store.read_rollouts(number, columns=["row_id", "policy"]).to_pylist()
        own = {row["row_id"] for row in called if row["policy"] == snapshot.name}
        rows = [row for row in rows if row["row_id"] in own]
    kept: dict[str, list[str]] = {}
    filtered: dict[str, list[str]] = {}
    for row in rows:
        kept.setdefault(row["group_id"], [])
        (kept if row["dropped_by"] is None else filtered).setdefault(row["group_id"], []).append(row["row_id"])
    return [
        Group(number, name, judge_version, version, tuple(ids), tuple(filtered.get(name, ())))
        for name, ids in kept.items()
    ]


def split_stale(groups: list[Group], version: int, limit: int | None) -> tuple[list[Group], list[Group]]:
    """Split groups into recent ones and too old ones, for a training that starts from policy ``version``.

    ``limit`` is the largest allowed age in policy versions; None allows any age.
    """
    if limit is None:
        return groups, []
    oldest = version - limit
    return [g for g in groups if g.policy_version >= oldest], [g for g in groups if g.policy_version < oldest]
