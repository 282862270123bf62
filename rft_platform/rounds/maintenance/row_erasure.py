"""Erase stored rows: a row stays as a tombstone without its content, and the canaries that may hold it are removed.

A tombstone has no learning signal. Row ids, rewards and versions stay, so that lineage still names the weights that
were trained on it. The ledger keeps the digests of the old files, so the round's digest does not change.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from rft_platform.experience.file_ledger import Contents, Ledger
from rft_platform.experience.maintenance import delete_superseded
from rft_platform.experience.notes import ASIDE
from rft_platform.experience.parquet import read_table, write_table
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.experience.schema import (
    JUDGED_SCHEMA,
    ROLLOUT_SCHEMA,
    judged_to_table,
    rows_to_table,
    table_to_judged,
    table_to_rows,
)
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import drop_canaries

if TYPE_CHECKING:
    import pyarrow as pa

    from rft_platform.experience.store import ExperienceStore
    from rft_platform.rounds.reporting.lineage import CheckpointRef


_TOKEN = 0  # token id of an erased response: a response has at least one token
TOMBSTONE = "erased"  #: ``finish_reason`` of an erased row

Rename: TypeAlias = Callable[[str], str]
Row = TypeVar("Row", RolloutRow, JudgedRow)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was erased, and the checkpoints that were trained on the erased rows."""

    rows: int
    rounds: tuple[int, ...]
    trained: "tuple[CheckpointRef, ...]"  # checkpoints whose training read the rows
    descendants: "tuple[CheckpointRef, ...]"  # later checkpoints that descend from those

    def and_of(self, other: "Forgotten") -> "Forgotten":
        """Both reports as one."""
        trained = {ref.checkpoint: ref for ref in (*self.trained, *other.trained)}
        later = {ref.checkpoint: ref for ref in (*self.descendants, *other.descendants)}
        rounds = tuple(sorted({*self.rounds, *other.rounds}))
        kept = tuple(ref for folder, ref in later.items() if folder not in trained)
        return Forgotten(self.rows + other.rows, rounds, tuple(trained.values()), kept)


def one_per_judgement(project: Project, number: int, rows: set[str]) -> set[str]:
    """One of the ``rows`` per judgement of the round, chosen from the rows that the judgement kept.

    A training of the round read all rows that its judgement kept, so one of them is enough to find its checkpoint.
    """
    found = set[str]()
    for version in project.store.judge_versions(number):
        kept = (row.row_id for row in project.store.judged_rows(number, version) if row.dropped_by is None)
        found |= {next((row_id for row_id in kept if row_id in rows), "")} - {""}
    return found


def erase_rows(store: "ExperienceStore", round_number: int, row_ids: Collection[str], rename: Rename) -> None:
    """Erase rows of a round from its files, and delete the files that held them; may be repeated.

    Damaged files of the round that were set aside are deleted, because their rows may not be readable. ``rename`` gives
    tasks and runs of the rows another name, and leaves a name that it gave unchanged. The canaries of the round's
    policies are removed first, and whole: the rows whose tokens they hold may be retired, lost or erased already.
    """
    wanted, ledger = set(row_ids), store.ledger(round_number)
    drop_canaries(store, round_number)
    with ledger.change() as contents:
        for name in contents.rollouts():
            rows = table_to_rows(read_table(ledger.folder / name, ROLLOUT_SCHEMA))
            found = [row for row in rows if row.row_id in wanted and row.call.finish_reason != TOMBSTONE]
            kept = _renamed([_tombstone(row) if row in found else row for row in rows], wanted, rename)
            if kept != rows:
                _rewrite(ledger, contents, name, rows_to_table(kept))
        for name in contents.judgements():
            judged = table_to_judged(read_table(ledger.folder / name, JUDGED_SCHEMA))
            renamed = _renamed(judged, wanted, rename)
            changed = zip(renamed, judged, strict=True)
            if any((new.group_id, new.judge_error) != (old.group_id, old.judge_error) for new, old in changed):
                _rewrite(ledger, contents, name, judged_to_table(renamed))
        for name in contents.unfinished():  # they may be answers to the same tasks
            del contents.files[name]
            contents.superseded[name] = time.time()
        delete_superseded(ledger, contents, [name for name in contents.superseded if name not in contents.files])
        for path in (ledger.folder / ASIDE).glob("*.parquet"):
            path.unlink(missing_ok=True)


def erase_judge_errors(store: "ExperienceStore", round_number: int) -> None:
    """Erase the texts of the judge's errors of a round whose rollouts are retired: they may quote any run of it."""
    ledger = store.ledger(round_number)
    with ledger.change() as contents:
        for name in contents.judgements():
            judged = table_to_judged(read_table(ledger.folder / name, JUDGED_SCHEMA))
            if any(row.judge_error is not None for row in judged):
                _rewrite(ledger, contents, name, judged_to_table([replace(row, judge_error=None) for row in judged]))


def _rewrite(ledger: Ledger, contents: Contents, name: str, table: "pa.Table") -> None:
    """Replace a file; its entry keeps the digest of the original one."""
    sources = contents.files[name].sources(name)
    ledger.land(contents, name, partial(write_table, table))
    contents.files[name] = replace(contents.files[name], made_of=sources)
    ledger.save(contents)


def _renamed(rows: list[Row], wanted: Collection[str], rename: Rename) -> list[Row]:
    """The rows, with other names for the tasks of the ``wanted`` rows and for the runs of these tasks."""
    groups = {row.group_id for row in rows if row.row_id in wanted}
    return [_with_names(row, rename) if row.group_id in groups else row for row in rows]


def _with_names(row: Row, rename: Rename) -> Row:
    renamed = replace(row, group_id=rename(row.group_id), run_id=rename(row.run_id))
    if isinstance(renamed, RolloutRow):
        return replace(renamed, task_id=rename(renamed.task_id))
    return replace(renamed, judge_error=None)  # the error of a judge may quote the runs of its group


def _tombstone(row: RolloutRow) -> RolloutRow:
    call = replace(
        row.call,
        prompt_ids=[_TOKEN],
        response_ids=[_TOKEN],
        rollout_logprobs=[0.0],
        finish_reason=TOMBSTONE,
        messages=[],
        tools=[],
        response={"role": "assistant", "content": ""},
    )
    return replace(row, call=call, loss_mask=[False], run_output=None)
