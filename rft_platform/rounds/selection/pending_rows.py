"""Rows that have landed (explored and judged) and that no training has taken yet, derived from the notes.

Before a training starts, the note ``row_selection`` of its round records the rows that the training takes: the training
is then *settled*. So only one training takes a row, even if a process is killed; only replay takes a row again.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rft_platform.common.policy_names import FIRST_POLICY, stored_name
from rft_platform.experience.selections import ROW_SELECTION
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.notes import JUDGE, POLICY
from rft_platform.rounds.project.project import Project


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
    note = selection_note(store, number) or {}
    left = pending_rows_by_round(store, note)
    open_note = {} if number == 0 or store.has_note(number, POLICY) else note
    return PendingRows(
        rounds=len(left),
        rows=sum(left.values()),
        settled=number,
        taken=tuple(n for n in open_note.get("fresh_rounds", ()) if n > through),
        training_steps=open_note.get("steps", 0),
    )


def pending_rows_by_round(store: ExperienceStore, note: dict[str, Any]) -> dict[int, int]:
    """Number of rows that no training has taken, by explored round. ``note`` is that of the newest settled training."""
    left = {int(number): rows for number, rows in note.get("left", {}).items()}
    return left | {number: store.count_kept(number) for number in explored_after(store, note.get("landed", 0))}


def explored_after(store: ExperienceStore, number: int) -> Iterator[int]:
    """The rounds after ``number`` that are explored and judged, up to the first gap."""
    return itertools.takewhile(lambda n: is_sound(store, n), itertools.count(number + 1))


def is_sound(store: ExperienceStore, number: int) -> bool:
    """Whether the round's judgement is sound. Rows of an unsound judgement do not count as landed."""
    note = store.read_note(number, JUDGE)
    return bool(note and note["sound"])


def newest(store: ExperienceStore) -> int:
    """The round of the newest settled training; 0 before the first."""
    return next((number for number in reversed(store.rounds()) if store.has_note(number, ROW_SELECTION)), 0)


def trained_through(project: Project) -> int:
    """The last round up to which published trainings have taken all rows of every round."""
    number = newest(project.store)
    while number and not project.store.has_note(number, POLICY):
        number -= 1
    return through(selection_note(project.store, number))


def through(note: dict[str, Any] | None) -> int:
    """The last round up to which the settled training with this note, and earlier ones, have taken all rows."""
    if note is None:
        return 0
    return min((int(number) for number in note["left"]), default=note["landed"] + 1) - 1


def selection_note(store: ExperienceStore, number: int, policy: str = FIRST_POLICY) -> dict[str, Any] | None:
    """The row selection for the training of a policy in a round; None before it is recorded, and for round 0."""
    note: dict[str, Any] | None = store.read_note(number, stored_name(ROW_SELECTION, policy)) if number else None
    return note


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
