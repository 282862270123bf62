"""Arrow schemas of the records, and conversion of records to tables and back."""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from rft_platform.common.errors import StorageError
from rft_platform.experience import columns
from rft_platform.experience.record import (
    CALL_COLUMNS,
    JUDGED_SCHEMA_VERSION,
    ROLLOUT_SCHEMA_VERSION,
    JudgedRow,
    RolloutRow,
)

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
    ("policy_version", pa.int64(), "Optimiser steps of the weights that sampled."),
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
        return columns.json_to_column(values)
    if pa.types.is_map(field.type):
        return columns.maps_to_column(values)
    if pa.types.is_list(field.type):
        return columns.lists_to_column(values, field.type.value_type)
    if pa.types.is_string(field.type):
        return columns.texts_to_column(values)
    return pa.array(values, type=field.type, from_pandas=field.name in MISSING_AS_NULL)  # from_pandas: NaN as null


def _decode(field: pa.Field, column: pa.ChunkedArray) -> list[Any]:
    if field.name in JSON_COLUMNS:
        return columns.column_to_json(column)
    if pa.types.is_map(field.type):
        return columns.column_to_maps(column)
    if pa.types.is_list(field.type):
        return columns.column_to_lists(column)
    if field.name in MISSING_AS_NULL:
        return column.fill_null(math.nan).to_pylist()
    return column.to_pylist()
