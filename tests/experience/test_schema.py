"""Rows to Arrow and back, without loss."""

import copy
import math
import pickle
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.common.errors import StorageError
from rft_platform.experience.parquet import read_table, write_table
from rft_platform.experience.record import CALL_COLUMNS, JudgedRow, ModelCall, RolloutRow
from rft_platform.experience.schema import (
    JUDGED_SCHEMA,
    ROLLOUT_SCHEMA,
    VERSION_KEY,
    check_schema,
    check_storable,
    judged_to_table,
    rows_to_table,
    table_to_judged,
    table_to_rows,
)

from .samples import judged, rollouts

#: Fields of a call that are needed only while the run lasts.
NOT_STORED = {"order", "choice", "reward", "constrained"}

finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def test_schemas_name_the_fields_of_the_records() -> None:
    of_row = [field.name for field in fields(RolloutRow) if field.name != "call"]
    of_call = [field.name for field in fields(ModelCall) if field.name not in NOT_STORED]
    assert sorted(ROLLOUT_SCHEMA.names) == sorted(of_row + of_call)
    assert JUDGED_SCHEMA.names == [field.name for field in fields(JudgedRow)]


def test_every_field_of_a_call_reaches_the_file(tmp_path: Path) -> None:
    """A field that is added to ``ModelCall`` must get a column, and a value here that is not its default."""
    call = ModelCall(
        msg_id="m", prompt_ids=[1, 2], response_ids=[3], rollout_logprobs=[-0.5], finish_reason="stop",
        temperature=0.75, top_p=0.5, top_k=7, messages=[{"role": "user", "content": "?"}], tools=[{"type": "function"}],
        response={"role": "assistant", "content": "!"}, policy_version=3, token_versions=[3], created_at=1.5,
        duration_s=2.5, metrics={"turns": 1.0}, env_state_hash="e", policy="p", step_reward=0.25,
    )  # fmt: skip
    for field in fields(ModelCall):
        if field.name not in NOT_STORED:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            assert getattr(call, field.name) != default, f"{field.name}: give it a value here"
    row = RolloutRow("id", "t", "set", "g", "r", 0, 1, "engine", "h", call, [True], False)
    write_table(rows_to_table([row]), tmp_path / "rows.parquet")
    (back,) = table_to_rows(read_table(tmp_path / "rows.parquet", ROLLOUT_SCHEMA))
    assert {name: getattr(back.call, name) for name in CALL_COLUMNS} == {
        name: getattr(call, name) for name in CALL_COLUMNS
    }
    assert back == row and set(CALL_COLUMNS) | NOT_STORED == {field.name for field in fields(ModelCall)}


def test_a_row_shows_the_fields_of_its_call() -> None:
    (row,) = rollouts(1, 1)
    assert all(getattr(row, name) is getattr(row.call, name) for name in CALL_COLUMNS)
    assert copy.deepcopy(row) == pickle.loads(pickle.dumps(row)) == row
    with pytest.raises(AttributeError, match="'RolloutRow' object has no attribute 'logprob'"):
        row.logprob  # noqa: B018


def test_rows_round_trip() -> None:
    rows = rollouts(5, 3)
    table = rows_to_table(rows)
    assert table.schema.equals(ROLLOUT_SCHEMA, check_metadata=True)
    assert table_to_rows(table) == rows
    assert table_to_rows(pa.concat_tables([table.slice(4, 7), table.slice(0, 4)])) == [*rows[4:11], *rows[:4]]
    assert table_to_judged(judged_to_table(judged(rows))) == judged(rows)


@given(
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=5),
    output=json_values,
    metrics=st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=3),
)
def test_rows_with_any_content_round_trip(ids: list[int], output: object, metrics: dict[str, float]) -> None:
    logprobs = np.linspace(-1, 0, len(ids), dtype=np.float32).tolist()
    rows = rollouts(
        1, 2, response_ids=ids, rollout_logprobs=logprobs, loss_mask=[True] * len(ids), run_output=output,
        metrics=metrics,
    )  # fmt: skip
    assert table_to_rows(rows_to_table(rows)) == rows


def test_a_reward_that_is_missing_is_null_in_the_file_and_nan_in_the_record() -> None:
    rows = judged(rollouts(1, 2))
    rows[0].reward = math.nan
    table = judged_to_table(rows)
    assert table["reward"].to_pylist() == [None, rows[1].reward]
    back = table_to_judged(table)
    assert math.isnan(back[0].reward) and back[1] == rows[1]


def test_no_rows() -> None:
    assert table_to_rows(rows_to_table([])) == []
    assert table_to_rows(ROLLOUT_SCHEMA.empty_table()) == []


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        rows_to_table(rollouts(1, 1, run_output=float("nan")))


@pytest.mark.parametrize("version", ["0", "2", None])
def test_a_file_of_another_schema_version_is_refused(version: str | None) -> None:
    others = {key: value for key, value in ROLLOUT_SCHEMA.metadata.items() if key != VERSION_KEY}
    schema = ROLLOUT_SCHEMA.with_metadata(others if version is None else {**others, VERSION_KEY: version})
    with pytest.raises(StorageError, match=rf"f\.parquet: has schema version {version or 'none'}, .* reads 1"):
        check_schema(schema, ROLLOUT_SCHEMA, "f.parquet")


def test_files_of_other_records_are_refused() -> None:
    with pytest.raises(StorageError, match="holds judged, expected rollout"):
        check_schema(JUDGED_SCHEMA, ROLLOUT_SCHEMA, "f.parquet")
    with pytest.raises(StorageError, match="no record of this platform"):
        check_schema(pa.schema([("a", pa.int8())]), ROLLOUT_SCHEMA, "f.parquet")


@pytest.mark.parametrize("version", [np.float32(1.5), 2.0, np.int64(3)])
def test_a_policy_version_that_is_no_int_is_refused_with_its_row(version: object) -> None:
    rows = rollouts()
    rows[1].call.policy_version = version  # type: ignore[assignment]
    with pytest.raises(ValueError, match=rf"rollout row {rows[1].row_id}: policy_version is .*, expected an int"):
        check_storable(rows)
