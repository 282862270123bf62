"""Erasure of rows: their text and tokens are replaced, and the row stays as a tombstone without a learning signal.

Row ids, rewards and versions stay, so that lineage still names the weights that were trained on the row. The ledger
keeps the digests of the old files, so the round's digest does not change. Clients may name a task after a person:
tasks and runs of erased rows are renamed, in all rows of the task, so that its runs still form one group.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from rft_platform.experience.file_ledger import Contents, Ledger
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

if TYPE_CHECKING:
    import pyarrow as pa

    from rft_platform.experience.store import ExperienceStore

_TOKEN = 0  # token id of an erased response: a response has at least one token
TOMBSTONE = "erased"  #: ``finish_reason`` of an erased row

Rename: TypeAlias = Callable[[str], str]
Row = TypeVar("Row", RolloutRow, JudgedRow)


def erase_rows(
    store: "ExperienceStore", round_number: int, row_ids: Collection[str], rename: Rename
) -> list[list[int]]:
    """Erase rows of a round from its files, and delete the files that held them; may be repeated.

    ``rename`` gives tasks and runs of the rows another name, and leaves a name that it gave unchanged. Returns the
    token ids that the rows had, prompt and response together.
    """
    wanted, ledger, erased = set(row_ids), store.ledger(round_number), list[list[int]]()
    with ledger.change() as contents:
        for name in contents.rollouts():
            rows = table_to_rows(read_table(ledger.folder / name, ROLLOUT_SCHEMA))
            found = [row for row in rows if row.row_id in wanted and row.call.finish_reason != TOMBSTONE]
            erased += [[*row.call.prompt_ids, *row.call.response_ids] for row in found]
            kept = _renamed([_tombstone(row) if row in found else row for row in rows], wanted, rename)
            if kept != rows:
                _rewrite(ledger, contents, name, rows_to_table(kept))
        for name in contents.judgements():
            judged = table_to_judged(read_table(ledger.folder / name, JUDGED_SCHEMA))
            renamed = _renamed(judged, wanted, rename)
            if any(one.group_id != other.group_id for one, other in zip(renamed, judged, strict=True)):
                _rewrite(ledger, contents, name, judged_to_table(renamed))
        for name in list(contents.superseded):
            if name not in contents.files:
                (ledger.folder / name).unlink(missing_ok=True)
                del contents.superseded[name]
    return erased


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
    return replace(renamed, task_id=rename(renamed.task_id)) if isinstance(renamed, RolloutRow) else renamed


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
