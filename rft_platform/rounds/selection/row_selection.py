"""Select the rows of a training. They are recorded before the training starts, so a retry takes the same.

``settled`` means: the selection is recorded. So only one training takes a row, even if a process is killed; only replay
takes a row again. ``PendingRows`` are rows that have landed (explored and judged) and that no training has taken yet.

Units are the groups of a round: the runs of one task that are compared, with the policy version that sampled them.
Replay decides which groups may be trained on again, and in which order. The use count of a group follows from the row
selections of past trainings, so no second store has to stay in sync.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from rft_platform.common.errors import PrerequisiteError, StorageError, UserError
from rft_platform.common.files import digest_file
from rft_platform.common.user_code import load_object
from rft_platform.config.schema.buffer import ReplayBuffer
from rft_platform.experience.file_names import round_key
from rft_platform.experience.parquet import fetch_unless_here
from rft_platform.experience.selections import (
    FILTERED,
    FRESH,
    REPLAY,
    STALE,
    TRAINED_ON,
    read_selection,
    selection_file,
    write_selection,
)
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RowSelection, published, read, snapshot_of, write
from rft_platform.rounds.project.repair import refuse_damaged_rows

_REMEMBERED = 1024  #: rounds whose groups a process remembers, about 50 kB each


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Dynamic styles: landed rows that no training has taken, and the newest settled training."""

    rounds: int = 0  # number of explored batches with such rows
    rows: int = 0  # the rows of these batches that no training took and no filter dropped
    replayable: int = 0  # rows trained on before that may be used again (replay)
    settled: int = 0  # number of the newest settled training; 0: none
    taken: tuple[int, ...] = ()  # batches with rows that this training uses first; empty once its policy is published
    training_steps: int = 0  # optimiser steps of this training; 0 once its policy is published


def pending_rows(project: Project, through: int) -> PendingRows:
    """Input of the plan in a dynamic style, without replay. ``through`` is the result of ``trained_through``."""
    store, number = project.store, newest(project.store)
    record = read(store, number)
    selection = record.selection()
    left = pending_rows_by_round(store, selection)
    training = None if record.has(Policy) else selection
    return PendingRows(
        rounds=len(left),
        rows=sum(left.values()),
        settled=number,
        taken=() if training is None else tuple(n for n in training.fresh_rounds if n > through),
        training_steps=0 if training is None else training.steps,
    )


def pending_rows_by_round(store: ExperienceStore, newest: RowSelection | None) -> dict[int, int]:
    """Number of rows that no training has taken, by explored round. ``newest`` is of the newest settled training."""
    left, landed = (newest.left, newest.landed) if newest is not None else ({}, 0)
    return left | {number: store.count_kept(number) for number in explored_after(store, landed)}


def explored_after(store: ExperienceStore, number: int) -> Iterator[int]:
    """The rounds after ``number`` that are explored and judged, up to the first gap."""
    return itertools.takewhile(lambda n: is_sound(store, n), itertools.count(number + 1))


def is_sound(store: ExperienceStore, number: int) -> bool:
    """Whether the round's judgement is sound. Rows of an unsound judgement do not count as landed."""
    judged = read(store, number).judged
    return judged is not None and judged.sound


def newest(store: ExperienceStore) -> int:
    """The round of the newest settled training; 0 before the first."""
    return next((number for number in reversed(store.rounds()) if read(store, number).has(RowSelection)), 0)


def trained_through(project: Project) -> int:
    """The last round up to which published trainings have taken all rows of every round.

    In a dynamic style training k takes rows of other rounds: that its policy is published does not mean that all rows
    of round k were trained on.
    """
    number = newest(project.store)
    while number and not read(project.store, number).has(Policy):
        number -= 1
    selection = read(project.store, number).selection()
    return 0 if selection is None else selection.through


def rows_wanted(project: Project) -> int:
    """Dynamic styles: the number of experiences at which a training may start."""
    sync = project.config.synchronizer
    steps = sync.sync_interval if sync.sync_style == "dynamic_by_trainer" else 1
    return steps * project.batches.train_batch_size


def rounds_ahead(project: Project) -> int:
    """Rounds by which exploration may be ahead of training; dynamic styles: rounds by which it is ahead now."""
    if not project.config.synchronizer.dynamic:
        return project.config.synchronizer.offset_rounds
    return max(0, max(project.store.rounds(), default=0) - newest(project.store))


#: Arguments: the policy version that sampled a group, its number of uses, and ``priority_fn_args.decay``.
Priority = Callable[..., float]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are compared with each other and are therefore trained on together."""

    round: int
    group_id: str
    judge_version: str
    policy_version: int  # the oldest that sampled a token of the group
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
    for training, selection in _trainings(project, number):
        taken = _trained_groups(store.root, training, selection.sha256)
        uses.update(taken)
        passed = time.time() - selection.settled_at
        if settings.reuse_cooldown_time is not None and 0 <= passed < settings.reuse_cooldown_time:
            resting |= taken
    rounds = [n for n in sorted({n for n, _ in uses}) if not store.ledger(n).read().retired]
    every = (group for n in rounds for group in _groups_once(store.root, n, store.digest(n)))
    groups = [group for group in every if group.key in uses and group.kept]
    return [replace(group, uses=uses[group.key]) for group in groups if group.key not in resting]


@lru_cache(maxsize=_REMEMBERED)
def _trained_groups(root: Path, training: int, _sha256: str) -> frozenset[tuple[int, str]]:
    """The groups that a training was trained on. The plan counts them at every tick, so each file is read once."""
    rows = read_selection(ExperienceStore(root), training, ["round", "group_id", "use"]).to_pylist()
    return frozenset((row["round"], row["group_id"]) for row in rows if row["use"] in TRAINED_ON)


@lru_cache(maxsize=_REMEMBERED)
def _groups_once(root: Path, number: int, _digest: str) -> tuple[Group, ...]:
    """``groups_of`` a round whose rows and judgement have a digest; read once too."""
    return tuple(groups_of(ExperienceStore(root), number))


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


def _trainings(project: Project, before: int) -> Iterator[tuple[int, RowSelection]]:
    """The number and the row selection of each training before ``before`` that has one."""
    for number in range(1, min(before, newest(project.store) + 1)):
        selection = read(project.store, number).selection()
        if selection is not None:
            yield number, selection


def groups_of(store: ExperienceStore, number: int, policy: str | None = None) -> list[Group]:
    """The groups of a round by its judgement in force, in row order; with ``policy``, only the rows of that policy.

    Raises PrerequisiteError if the round is not explored and judged, StorageError if its judgement was lost.
    """
    snapshot = None if policy is None else snapshot_of(store, number, policy)
    explored, judge_version = read(store, number).explored, store.judge_version(number)
    if explored is None or judge_version is None:
        key, job = round_key(number), "explore_job" if explored is None else "judge_job"
        kind = StorageError if is_sound(store, number) else PrerequisiteError
        raise kind(f"{key} has no judgement in force to train on: launch {job} for {key}")
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
        Group(
            number,
            name,
            judge_version,
            explored.older_groups.get(name, version),
            tuple(ids),
            tuple(filtered.get(name, ())),
        )
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


@dataclass(slots=True)
class Choice:
    """The groups of a selection by their use."""

    fresh: list[Group] = field(default_factory=list)
    replay: list[Group] = field(default_factory=list)
    stale: list[Group] = field(default_factory=list)
    left: list[Group] = field(default_factory=list)  # left for a later training

    @property
    def rows(self) -> int:
        """Number of experiences that are trained on."""
        return sum(len(group.kept) for group in (*self.fresh, *self.replay))

    def uses(self) -> Iterator[tuple[Group, str, tuple[str, ...]]]:
        """Each group with a use and the row ids it applies to."""
        for use, groups in ((FRESH, self.fresh), (REPLAY, self.replay), (STALE, self.stale)):
            for group in groups:
                yield group, use, group.kept
                if use != REPLAY:
                    yield group, FILTERED, group.filtered


def select_rows(project: Project, number: int, parent: Policy) -> RowSelection:
    """Select the rows for a round's training of ``parent``. An earlier selection is kept.

    Rows are selected again only if the round is not trained yet, and the selection file or its rows are gone or, in the
    style ``fixed``, the round was explored or judged again. Raises DamagedError if files that the training
    reads are damaged.
    """
    checked = set() if project.config.synchronizer.dynamic else {number}
    for each in checked:  # before the selection reads its rows
        refuse_damaged_rows(project.store, each, Judged)
    selection = _select(project, number, parent)
    for each in set(selection.rounds) - checked:
        refuse_damaged_rows(project.store, each, Judged)
    return selection


def _select(project: Project, number: int, parent: Policy) -> RowSelection:
    store, name = project.store, parent.name
    known = read(store, number).selection(name)
    if known is not None and (published(store, number, name) is not None or _still_valid(project, number, known, name)):
        return known
    chosen, landed = choose(project, number, parent)
    rows = [
        {
            "row_id": row_id,
            "group_id": group.group_id,
            "round": group.round,
            "judge_version": group.judge_version,
            "policy_version": group.policy_version,
            "use": use,
            "uses": group.uses,
        }
        for group, use, ids in chosen.uses()
        for row_id in ids
    ]
    digest = None if project.config.synchronizer.dynamic else store.digest(number)
    sha256 = write_selection(store, number, rows, name)
    selection = replace(_describe(project, chosen, rows, parent, landed), sha256=sha256, digest=digest)
    write(store, number, selection, name)
    return selection


def choose(project: Project, number: int, parent: Policy) -> tuple[Choice, int]:
    """Decide which groups a round's training takes; also returns the last round considered.

    In the style ``fixed`` the training takes all rows of the round, in ``dynamic_by_trainer`` all rows of rounds up to
    ``number``, and in ``dynamic_by_explorer`` all landed rows. If these do not fill whole optimiser steps, further
    groups are added by priority: fresh groups of later rounds in the style ``dynamic_by_trainer``, and groups that were
    trained on before if replay is on.
    """
    (fresh, landed), config, step = _fresh(project, number, parent), project.config, project.batches.train_batch_size
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer
    limit = config.synchronizer.max_staleness if project.traffic is None else None  # traffic leaves old rows out
    current, stale = split_stale(fresh, parent.policy_version, limit)
    all_at_once = config.synchronizer.sync_style != "dynamic_by_trainer"
    later = [] if all_at_once else [group for group in current if group.round > number and group.kept]
    later_keys = {group.key for group in later}
    chosen = Choice(fresh=[group for group in current if group.key not in later_keys], stale=stale)
    room = max(1, math.ceil(chosen.rows / step)) * step if all_at_once else rows_wanted(project)
    again = used_groups(project, number) if replay.enable and chosen.rows < room else []
    for group in by_priority([*later, *split_stale(again, parent.policy_version, limit)[0]], priority_of(replay)):
        if chosen.rows + len(group.kept) <= room or not chosen.rows:
            (chosen.replay if group.uses else chosen.fresh).append(group)
        elif not group.uses:
            chosen.left.append(group)
    return chosen, landed


def _fresh(project: Project, number: int, parent: Policy) -> tuple[list[Group], int]:
    """Groups that no training before ``number`` took, in row order, and the last round considered.

    Raises PrerequisiteError if no round has landed since the training before, and replay is off.
    """
    if not project.config.synchronizer.dynamic:
        return groups_of(project.store, number, parent.name if len(project.policies) > 1 else None), number
    store, before = project.store, read(project.store, number - 1).selection()
    left = pending_rows_by_round(store, before)
    if not left and not project.config.buffer.trainer_input.experience_buffer.replay_buffer.enable:
        raise PrerequisiteError(f"{round_key(number)} has no new rows to train on: run explore_job for it first")
    taken = _taken(project, number, set(before.left if before else ()))
    groups = [group for n in sorted(left) for group in groups_of(store, n) if group.key not in taken]
    return groups, max([before.landed if before else 0, *left])


def _taken(project: Project, number: int, rounds: set[int]) -> set[tuple[int, str]]:
    """Groups of ``rounds`` that trainings before ``number`` took."""
    taken: set[tuple[int, str]] = set()
    for training in range(number - 1, 0, -1):
        selection = read(project.store, training).selection()
        if not rounds or selection is None or selection.landed < min(rounds):
            break
        rows = read_selection(project.store, training, ["round", "group_id"]).to_pylist()
        taken |= {(row["round"], row["group_id"]) for row in rows if row["round"] in rounds}
    return taken


def _describe(
    project: Project, chosen: Choice, rows: list[dict[str, Any]], parent: Policy, landed: int
) -> RowSelection:
    """The selection for the round's record, with what the plan and people read."""
    left: dict[int, int] = {}
    for group in chosen.left:
        left[group.round] = left.get(group.round, 0) + len(group.kept)
    versions = [row["policy_version"] for row in rows if row["use"] in (FRESH, REPLAY)]
    lag = [parent.policy_version - version for version in versions]
    return RowSelection(
        rows={use: sum(row["use"] == use for row in rows) for use in (FRESH, REPLAY, FILTERED, STALE)},
        judge_versions={row["round"]: row["judge_version"] for row in rows},
        fresh_rounds=sorted({row["round"] for row in rows if row["use"] != REPLAY}),
        parent_version=parent.policy_version,
        policy_versions=[min(versions), max(versions)] if versions else [],
        staleness_mean=sum(lag) / len(lag) if lag else 0.0,
        staleness_max=max(lag, default=0),
        steps=project.batches.epochs * math.ceil(len(versions) / project.batches.train_batch_size),
        landed=landed,
        left=left,
        last=landed >= project.rounds_budget and not left,
        settled_at=time.time(),
    )


def _still_valid(project: Project, number: int, known: RowSelection, policy: str) -> bool:
    """Whether the selection's file and the rows that it takes are still there and unchanged."""
    store, file = project.store, selection_file(project.store, number, policy)
    if not fetch_unless_here(file) or digest_file(file) != known.sha256:
        return False
    if known.digest is not None and known.digest != store.digest(number):
        return False
    if known.digest is None and not _rows_exist(store, number, known, policy):
        return False
    return not any(store.ledger(n).read().retired for n in known.rounds if n not in known.fresh_rounds)


def _rows_exist(store: ExperienceStore, number: int, known: RowSelection, policy: str) -> bool:
    """Whether the rounds still have the rows that the selection takes: one may have been explored again since.

    Rows whose files are missing or cannot be read count as existing: the code that reads them reports that.
    """
    rows = read_selection(store, number, ["row_id", "use"], policy).to_pylist()
    missing = {row["row_id"] for row in rows if row["use"] != STALE}
    with suppress(StorageError):
        for each in known.rounds:
            if not store.rollout_files(each):
                return True
            missing -= set(store.read_rollouts(each, ["row_id"])["row_id"].to_pylist())
        return not missing
    return True
