"""Checks of a table before it is stored."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rft_platform.experience.columns import list_lengths
from rft_platform.experience.record import METRIC_EXPECTED, RolloutRow, is_metric_value
from rft_platform.experience.schema import rows_to_table


def check_storable(rows: Sequence[RolloutRow]) -> None:
    """Raise ValueError if the rows of one run cannot be stored or averaged, so that only this run fails."""
    table = rows_to_table(rows)
    check_whole_numbers(rows)
    for name, value in ((name, value) for row in rows for name, value in row.call.metrics.items()):
        if not is_metric_value(value):
            raise ValueError(f"the metric {name!r} is {value!r}; expected {METRIC_EXPECTED}")
    check_lengths(table)
    check_unique(table)


def check_whole_numbers(rows: Sequence[RolloutRow]) -> None:
    """Refuse a value that must be an int and is not: Arrow truncates fractions, and JSON cannot hold NumPy numbers."""
    for row in rows:
        facts = {"policy_version": row.call.policy_version, "top_k": row.call.top_k, "step": row.step}
        for name, value in facts.items():
            if value is not None and not isinstance(value, int):
                raise ValueError(f"rollout row {row.row_id}: {name} is {value!r}, expected an int")


def check_lengths(table: pa.Table) -> None:
    """Refuse a row whose log-probs or mask do not have one value per response token."""
    expected = list_lengths(table["response_ids"])
    for name in ("rollout_logprobs", "loss_mask"):
        found = list_lengths(table[name])
        wrong = np.flatnonzero(found != expected)
        if wrong.size:
            index = int(wrong[0])
            row = table["row_id"][index].as_py()
            raise ValueError(
                f"rollout row {row}: {found[index]} {name} for {expected[index]} response_ids, expected as many"
            )


def check_round(table: pa.Table, round: int) -> None:
    """Refuse a row of another round."""
    wrong = np.flatnonzero(table["round"].to_numpy() != round)
    if wrong.size:
        row, found = table["row_id"][int(wrong[0])].as_py(), table["round"][int(wrong[0])].as_py()
        raise ValueError(f"rollout row {row}: belongs to round {found}, written to round {round}")


def check_judge(table: pa.Table, judge_version: str) -> None:
    """Refuse a row of another judge version."""
    for row, found in zip(table["row_id"].to_pylist(), table["judge_version"].to_pylist(), strict=True):
        if found != judge_version:
            raise ValueError(f"judged row {row}: judge version {found!r}, expected {judge_version!r}")


def check_unique(table: pa.Table, others: Sequence[pa.Table] = ()) -> None:
    """Refuse a ``row_id`` that occurs twice in ``table``, or also in one of ``others``."""
    seen = {row for other in others for row in other["row_id"].to_pylist()}
    for row in table["row_id"].to_pylist():
        if row in seen:
            raise ValueError(f"row {row}: occurs twice; row ids are unique in a round (was a batch renumbered?)")
        seen.add(row)
