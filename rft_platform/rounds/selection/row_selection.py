"""Select the rows of a training. They are recorded before the training starts, so a retry takes the same.

``settled`` means: the selection is recorded.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rft_platform.common.files import digest_file
from rft_platform.experience.selections import (
    FILTERED,
    FRESH,
    REPLAY,
    STALE,
    read_selection,
    selection_file,
    write_selection,
)
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RowSelection, published, read, snapshot_of, write
from rft_platform.rounds.project.repair import refuse_damaged_rows
from rft_platform.rounds.selection.pending_rows import pending_rows_by_round, rows_wanted
from rft_platform.rounds.selection.training_groups import (
    Group,
    by_priority,
    groups_of,
    priority_of,
    split_stale,
    used_groups,
)


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

    Rows are selected again only if the round is not trained yet, and the selection file or the rows to reuse are gone
    or, in the style ``fixed``, the round was explored or judged again. Raises DamagedError if files that the training
    reads are damaged.
    """
    checked = set() if project.config.synchronizer.dynamic else {number}
    for each in checked:  # before the selection reads its rows
        refuse_damaged_rows(project, each, Judged)
    selection = _select(project, number, parent)
    for each in set(selection.rounds) - checked:
        refuse_damaged_rows(project, each, Judged)
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
    sha256 = digest_file(write_selection(store, number, rows, name))
    digest = None if project.config.synchronizer.dynamic else store.digest(number)
    selection = replace(_describe(project, chosen, rows, parent, landed), sha256=sha256, digest=digest)
    write(store, number, selection, name)
    return selection


def choose(project: Project, number: int, parent: Policy) -> tuple[Choice, int]:
    """Decide which groups a round's training takes; also returns the last round considered.

    In the style ``fixed`` the training takes all rows of the round, in ``dynamic_by_trainer`` all rows of rounds up to
    ``number``, and in ``dynamic_by_explorer`` all landed rows. If
    these do not fill whole optimiser steps, further groups are added by priority: fresh groups of later rounds in the
    style ``dynamic_by_trainer``, and groups that were trained on before if replay is on.
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
    """Groups that no training before ``number`` took, in row order, and the last round considered."""
    if not project.config.synchronizer.dynamic:
        snapshot = snapshot_of(project.store, number, parent.name) if len(project.policies) > 1 else None
        return groups_of(project.store, number, snapshot), number
    store, before = project.store, read(project.store, number - 1).selection()
    left = pending_rows_by_round(store, before)
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
    if not file.is_file() or digest_file(file) != known.sha256:
        return False
    if known.digest is not None and known.digest != store.digest(number):
        return False
    return not any(store.ledger(n).read().retired for n in known.rounds if n not in known.fresh_rounds)
