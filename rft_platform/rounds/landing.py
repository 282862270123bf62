"""What has landed and no training has taken yet: read from the notes that settled trainings left, never kept twice.

A training settles which rows it takes in the note ``row_selection`` of its round, before it begins; so whatever is
killed, each row is taken by one training, or again by replay.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from rft_platform.experience.selections import selection_name
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.judge import NOTE as JUDGE
from rft_platform.rounds.policy import NOTE as POLICY
from rft_platform.rounds.project import Project
from rft_platform.rounds.state import Landed

#: The note of a round about the rows that its training of the first policy takes.
NOTE = selection_name()


def landed(project: Project, through: int) -> Landed:
    """What the plan of a dynamic style has to know, without replay. ``through``: what ``trained_through`` says."""
    store, number = project.store, newest(project.store)
    note = selection_note(store, number) or {}
    left = untaken(store, note)
    open_note = {} if number == 0 or store.has_note(number, POLICY) else note
    return Landed(
        rounds=len(left),
        rows=sum(left.values()),
        settled=number,
        taken=tuple(n for n in open_note.get("fresh_rounds", ()) if n > through),
        training_steps=open_note.get("steps", 0),
    )


def untaken(store: ExperienceStore, note: dict[str, Any]) -> dict[int, int]:
    """Rows of each explored round that no training has taken, after the settled one that left ``note``."""
    left = {int(number): rows for number, rows in note.get("left", {}).items()}
    return left | {number: store.count_kept(number) for number in explored_after(store, note.get("landed", 0))}


def explored_after(store: ExperienceStore, number: int) -> Iterator[int]:
    """The rounds after ``number`` that are explored and judged, without a gap."""
    return itertools.takewhile(lambda n: is_sound(store, n), itertools.count(number + 1))


def is_sound(store: ExperienceStore, number: int) -> bool:
    """Rows that a blocking check refuses are not waited on as if they could train."""
    note = store.read_note(number, JUDGE)
    return bool(note and note["sound"])


def newest(store: ExperienceStore) -> int:
    """The newest round whose training has settled its rows; 0 before the first."""
    return next((number for number in reversed(store.rounds()) if store.has_note(number, NOTE)), 0)


def trained_through(project: Project) -> int:
    """The last of the rounds, without a gap from the first, whose rows have all been taken by published trainings."""
    number = newest(project.store)
    while number and not project.store.has_note(number, POLICY):
        number -= 1
    return through(selection_note(project.store, number))


def through(note: dict[str, Any] | None) -> int:
    """The last of the rounds, without a gap from the first, of which no row is left after a settled training."""
    if note is None:
        return 0
    return min((int(number) for number in note["left"]), default=note["landed"] + 1) - 1


def selection_note(store: ExperienceStore, number: int, policy: str | None = None) -> dict[str, Any] | None:
    """What a round's training of a policy has settled; None before it has, and for round 0."""
    note: dict[str, Any] | None = store.read_note(number, selection_name(policy)) if number else None
    return note


def rows_wanted(project: Project) -> int:
    """Experiences that let a training of a dynamic style begin."""
    sync = project.config.synchronizer
    steps = sync.sync_interval if sync.sync_style == "dynamic_by_trainer" else 1
    return steps * project.batches.train_batch_size


def rounds_ahead(project: Project) -> int:
    """Rounds that exploration may be ahead of training, by now in the dynamic styles."""
    if not project.config.synchronizer.dynamic:
        return project.config.synchronizer.offset_rounds
    return max(0, max(project.store.rounds(), default=0) - newest(project.store))
