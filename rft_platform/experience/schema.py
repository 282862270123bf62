"""Arrow schemas of the records, and conversion of records to tables and back, with checks before a table is stored.

Columns are converted without Python loops over single tokens.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rft_platform.common.errors import StorageError
from rft_platform.experience.record import (
    CALL_COLUMNS,
    JUDGED_SCHEMA_VERSION,
    METRIC_EXPECTED,
    ROLLOUT_SCHEMA_VERSION,
    JudgedRow,
    RolloutRow,
    is_metric_value,
    valid_text,
)

#: Maximum nesting of lists and dictionaries in a JSON value. Parsers recurse; Python's parser fails before 1000 levels.
DEEPEST_JSON = 200

_NUMPY = {pa.int32(): np.int32, pa.float32(): np.float32, pa.bool_(): np.bool_}


def lists_to_column(values: Sequence[Sequence[Any]], kind: pa.DataType) -> pa.ListArray:
    """One list per row -> ``list<kind>``; ``kind`` is int32, float32 or bool."""
    offsets = _offsets(values)
    flat: np.ndarray = np.fromiter(chain.from_iterable(values), dtype=_NUMPY[kind], count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, type=kind))


def column_to_lists(column: pa.ChunkedArray) -> list[list[Any]]:
    """``list<kind>`` -> one list per row."""
    rows: list[list[Any]] = []
    for chunk in column.chunks:
        flat = chunk.values.to_numpy(zero_copy_only=False).tolist()
        rows += [flat[start:stop] for start, stop in pairwise(chunk.offsets.to_pylist())]
    return rows


def list_lengths(column: pa.ChunkedArray) -> np.ndarray:
    """Length of each row's list, shape [rows]."""
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks] or [np.empty(0, np.int32)])


def maps_to_column(values: Sequence[dict[str, float]]) -> pa.MapArray:
    """One dictionary per row -> ``map<string, double>``."""
    offsets = _offsets(values)
    keys = texts_to_column(list(chain.from_iterable(values)))
    items = chain.from_iterable(value.values() for value in values)
    numbers = np.fromiter(items, dtype=np.float64, count=int(offsets[-1]))
    return pa.MapArray.from_arrays(pa.array(offsets), keys, pa.array(numbers))


def column_to_maps(column: pa.ChunkedArray) -> list[dict[str, float]]:
    """``map<string, double>`` -> one dictionary per row."""
    rows: list[dict[str, float]] = []
    for chunk in column.chunks:
        pairs = list(zip(chunk.keys.to_pylist(), chunk.items.to_pylist(), strict=True))
        rows += [dict(pairs[start:stop]) for start, stop in pairwise(chunk.offsets.to_pylist())]
    return rows


def texts_to_column(values: Sequence[str | None]) -> pa.StringArray:
    """One text per row -> string. Characters that UTF-8 cannot encode are replaced (``valid_text``)."""
    try:
        return pa.array(values, type=pa.string())
    except UnicodeEncodeError:
        return pa.array([value if value is None else valid_text(value) for value in values], type=pa.string())


def json_to_column(values: Iterable[Any]) -> pa.StringArray:
    """One JSON value per row -> string; ``None`` stays null. ValueError for values that are not JSON or too deep."""
    seen: dict[int, str] = {}

    def encode(value: Any) -> str | None:
        if value is None:
            return None
        text = seen.get(id(value))
        if text is None:
            text = seen[id(value)] = _json(value)
        return text

    kept = list(values)  # keeps every object alive, so that no id is reused
    return texts_to_column([encode(value) for value in kept])


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # ``json.dumps`` would make one for every value


def _json(value: Any) -> str:
    try:
        text = _ENCODER.encode(value)
        too_deep = text.count("[") + text.count("{") > DEEPEST_JSON and _is_too_deep(value)
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"a JSON value is nested more than {DEEPEST_JSON} levels deep")
    return text


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST_JSON + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list | tuple)]
        if not level:
            return False
    return True


def column_to_json(column: pa.ChunkedArray) -> list[Any]:
    """String -> one JSON value per row. Rows with equal text share one object: treat it as read-only."""
    parse: Callable[[str], Any] = json.loads
    seen: dict[str | None, Any] = {None: None}
    texts = column.to_pylist()
    for text in texts:
        if text not in seen:
            seen[text] = parse(text)
    return [seen[text] for text in texts]


def same_rows(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables hold the same values in the same order; NaN counts as equal to NaN."""
    if one.column_names != other.column_names or one.num_rows != other.num_rows:
        return False
    return all(a.equals(b) or _texts(a) == _texts(b) for a, b in zip(one.columns, other.columns, strict=True))


def _texts(column: pa.ChunkedArray) -> list[str]:
    return [repr(value) for value in column.to_pylist()]


def _offsets(values: Sequence[Any]) -> np.ndarray:
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    offsets[1:] = np.cumsum(np.fromiter(map(len, values), dtype=np.int64, count=len(values)))
    return offsets


VERSION_KEY = b"rft.schema_version"
RECORD_KEY = b"rft.record"

_TOKENS = pa.list_(pa.int32())
_METRICS = pa.map_(pa.string(), pa.float64())

#: Columns with their descriptions, which Dagster shows.
_ROLLOUT_COLUMNS = [
    ("row_id", pa.string(), "Id of the model call, computed from run, step and choice; the judgement refers to it."),
    ("task_id", pa.string(), "The task: a digest of its row."),
    ("taskset", pa.string(), "The taskset of the task."),
    ("group_id", pa.string(), "The runs of one task in one round."),
    ("run_id", pa.string(), "One run of the workflow."),
    ("step", pa.int32(), "Position of the call in its run, from 0."),
    ("msg_id", pa.string(), "Id of the engine's response."),
    ("round", pa.int32(), "The round that explored."),
    ("policy_version", pa.int64(), "Optimiser steps of the weights that sampled, at the end of the answer."),
    (
        "token_versions",
        _TOKENS,
        "Optimiser steps of the weights that sampled each token; empty: `policy_version` sampled all of them.",
    ),
    ("engine", pa.string(), "Name and version of the engine."),
    ("template_hash", pa.string(), "Digest of the chat template that rendered the prompt."),
    ("prompt_ids", _TOKENS, "Token ids of the prompt, as the engine saw them."),
    ("response_ids", _TOKENS, "Token ids of the answer, as the engine sampled them."),
    (
        "rollout_logprobs",
        pa.list_(pa.float32()),
        "Natural logarithms under the sampling distribution, one for each token of the answer.",
    ),
    ("loss_mask", pa.list_(pa.bool_()), "Whether each token of the answer may be trained on."),
    ("temperature", pa.float64(), "Sampling parameter."),
    ("top_p", pa.float64(), "Sampling parameter."),
    ("top_k", pa.int32(), "Sampling parameter; -1: no limit."),
    ("finish_reason", pa.string(), "Why the answer ended."),
    ("truncated", pa.bool_(), "Whether the answer was cut."),
    ("messages", pa.string(), "The conversation before the answer, as JSON."),
    ("tools", pa.string(), "The tools offered, as JSON."),
    ("response", pa.string(), "The message of the assistant, as JSON."),
    ("run_output", pa.string(), "What the workflow returned for the judge, as JSON; in the run's last row."),
    ("run_reward", pa.float64(), "The reward that the workflow returned; in the run's last row."),
    ("metrics", _METRICS, "Numbers by name; those of the workflow are in the run's last row."),
    ("created_at", pa.float64(), "Time of the call, in seconds since 1970."),
    ("duration_s", pa.float64(), "Seconds that the call took."),
    ("attempt", pa.int32(), "Attempt of the run, from 0."),
    ("env_state_hash", pa.string(), "Digest of the environment's state at this call, if the workflow set it."),
    ("policy", pa.string(), "The trainable policy that was called."),
    ("step_reward", pa.float64(), "The environment's reward for this step, if the workflow set it."),
]
ROLLOUT_SCHEMA = pa.schema(
    [(name, kind) for name, kind, _ in _ROLLOUT_COLUMNS],
    metadata={RECORD_KEY: b"rollout", VERSION_KEY: str(ROLLOUT_SCHEMA_VERSION).encode()},
)

_JUDGED_COLUMNS = [
    ("row_id", pa.string(), "Id of the model call, computed from run, step and choice; the judgement refers to it."),
    ("group_id", pa.string(), "The runs of one task in one round."),
    ("run_id", pa.string(), "One run of the workflow."),
    ("step", pa.int32(), "Position of the call in its run, from 0."),
    ("reward", pa.float64(), "Reward of the run, equal in all its rows; null if the judge failed."),
    ("reward_parts", _METRICS, "The judge's parts and metrics by name."),
    ("judge_version", pa.string(), "Digest of the judge and its code; `workflow` if the workflow sets the reward."),
    ("advantage", pa.float64(), "Advantage of the row, one number for all its tokens."),
    ("dropped_by", pa.string(), "The operator that excludes the row from training, or `judge_error`; null: it trains."),
    ("masked", pa.bool_(), "`dropped_by` is set, but the reward of the run counts in its group."),
    ("judge_error", pa.string(), "Why the judge failed on the run, with the place in your code; null: it did not."),
]
JUDGED_SCHEMA = pa.schema(
    [(name, kind) for name, kind, _ in _JUDGED_COLUMNS],
    metadata={RECORD_KEY: b"judged", VERSION_KEY: str(JUDGED_SCHEMA_VERSION).encode()},
)

#: What each column of both tables holds. Not stored in the files: every file of a round would repeat the texts.
DESCRIPTIONS = {name: text for name, _, text in (*_ROLLOUT_COLUMNS, *_JUDGED_COLUMNS)}

#: Columns whose missing value is NaN in a record and null in a file.
MISSING_AS_NULL = frozenset({"reward"})

#: Columns that hold a JSON document as text.
JSON_COLUMNS = frozenset({"messages", "tools", "response", "run_output"})


def rows_to_table(rows: Sequence[RolloutRow]) -> pa.Table:
    """Rollout rows as a table of ``ROLLOUT_SCHEMA``. ValueError names the column that cannot hold a value."""
    places = [f"call.{name}" if name in CALL_COLUMNS else name for name in ROLLOUT_SCHEMA.names]
    return _to_table(rows, ROLLOUT_SCHEMA, places)


def table_to_rows(table: pa.Table) -> list[RolloutRow]:
    """The rows of a rollout table. Rows with equal JSON documents share one object: treat it as read-only."""
    return _from_table(table, ROLLOUT_SCHEMA, RolloutRow.from_columns)


def judged_to_table(rows: Sequence[JudgedRow]) -> pa.Table:
    """Judged rows as a table of ``JUDGED_SCHEMA``."""
    return _to_table(rows, JUDGED_SCHEMA, JUDGED_SCHEMA.names)


def table_to_judged(table: pa.Table) -> list[JudgedRow]:
    """The rows of a judged table."""
    return _from_table(table, JUDGED_SCHEMA, JudgedRow)


def check_schema(schema: pa.Schema, expected: pa.Schema, source: str) -> None:
    """Raise StorageError for a file of another record type, of another schema version, or without a column."""
    metadata, expected_metadata = schema.metadata or {}, expected.metadata
    if metadata.get(RECORD_KEY) != expected_metadata[RECORD_KEY]:
        found = metadata.get(RECORD_KEY, b"no record of this platform").decode()
        raise StorageError(f"{source}: holds {found}, expected {expected_metadata[RECORD_KEY].decode()} rows")
    version, known = metadata.get(VERSION_KEY, b"none").decode(), expected_metadata[VERSION_KEY].decode()
    if version != known:
        raise StorageError(f"{source}: has schema version {version}, this version of rft-platform reads {known}")
    if absent := [name for name in expected.names if name not in schema.names]:
        raise StorageError(f"{source}: has no column {absent[0]}, which schema version {version} has")


def _to_table(rows: Sequence[Any], schema: pa.Schema, places: Sequence[str]) -> pa.Table:
    """A table of ``schema``; ``places`` are the attributes of a row that hold the columns."""
    columns = [_column(field, list(map(attrgetter(place), rows))) for field, place in zip(schema, places, strict=True)]
    return pa.Table.from_arrays(columns, schema=schema)


def _from_table(table: pa.Table, schema: pa.Schema, record: Callable[..., Any]) -> list[Any]:
    values = [_decode(field, table.column(field.name)) for field in schema]
    return [record(**dict(zip(schema.names, row, strict=True))) for row in zip(*values, strict=True)]


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    try:
        return _encode(field, values)
    except (TypeError, ValueError, OverflowError, AttributeError, pa.ArrowException) as error:
        raise ValueError(f"column {field.name} cannot store this value: {error}") from error


def _encode(field: pa.Field, values: list[Any]) -> pa.Array:
    if field.name in JSON_COLUMNS:
        return json_to_column(values)
    if pa.types.is_map(field.type):
        return maps_to_column(values)
    if pa.types.is_list(field.type):
        return lists_to_column(values, field.type.value_type)
    if pa.types.is_string(field.type):
        return texts_to_column(values)
    return pa.array(values, type=field.type, from_pandas=field.name in MISSING_AS_NULL)  # from_pandas: NaN as null


def _decode(field: pa.Field, column: pa.ChunkedArray) -> list[Any]:
    if field.name in JSON_COLUMNS:
        return column_to_json(column)
    if pa.types.is_map(field.type):
        return column_to_maps(column)
    if pa.types.is_list(field.type):
        return column_to_lists(column)
    if field.name in MISSING_AS_NULL:
        return column.fill_null(math.nan).to_pylist()
    return column.to_pylist()


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
    """Refuse a row whose log-probs, mask or (if present) versions do not have one value per response token."""
    expected = list_lengths(table["response_ids"])
    for name in ("rollout_logprobs", "loss_mask", "token_versions"):
        found = list_lengths(table[name])
        wrong = np.flatnonzero((found != expected) & ((found > 0) | (name != "token_versions")))
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
