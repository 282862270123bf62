"""Rows that have landed (explored and judged) and that no training has taken yet, derived from the rounds' records.

Before a training starts, its round's record names the rows that the training takes (``RowSelection``): the training is
then *settled*. So only one training takes a row, even if a process is killed; only replay takes a row again.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RowSelection, read


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
    """The last round up to which published trainings have taken all rows of every round."""
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
