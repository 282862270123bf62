"""Erasure of rows: their text and tokens are replaced, and the row stays as a tombstone without a learning signal.

Ids, rewards and versions stay, so that lineage still names the weights that were trained on the row. The ledger keeps
the digests of the old files, so the round's digest does not change.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rft_platform.experience.file_ledger import SourceFile
from rft_platform.experience.parquet import read_table, write_table
from rft_platform.experience.record import RolloutRow
from rft_platform.experience.schema import ROLLOUT_SCHEMA, rows_to_table, table_to_rows

if TYPE_CHECKING:
    from rft_platform.experience.store import ExperienceStore

_TOKEN = 0  # token id of an erased response: a response has at least one token
TOMBSTONE = "erased"  #: ``finish_reason`` of an erased row


def erase_rows(store: "ExperienceStore", round_number: int, row_ids: Collection[str]) -> list[list[int]]:
    """Erase rows of a round from its rollout files, and delete the files that held them; may be repeated.

    Returns the token ids that the rows had, prompt and response together.
    """
    wanted, ledger, erased = set(row_ids), store.ledger(round_number), list[list[int]]()
    with ledger.change() as contents:
        for name in contents.rollouts():
            path, entry = ledger.folder / name, contents.files[name]
            rows = table_to_rows(read_table(path, ROLLOUT_SCHEMA))
            found = [row for row in rows if row.row_id in wanted and row.call.finish_reason != TOMBSTONE]
            if not found:
                continue
            erased += [[*row.call.prompt_ids, *row.call.response_ids] for row in found]
            sources: tuple[SourceFile, ...] = entry.sources(name)
            table = rows_to_table([_tombstone(row) if row in found else row for row in rows])
            ledger.land(contents, name, partial(write_table, table))
            contents.files[name] = replace(contents.files[name], made_of=sources)
            ledger.save(contents)
        for name in list(contents.superseded):
            if name not in contents.files:
                (ledger.folder / name).unlink(missing_ok=True)
                del contents.superseded[name]
    return erased


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
