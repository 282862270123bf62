"""Convert Python values to Arrow columns and back, column by column, without Python loops over single tokens."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rft_platform.experience.record import valid_text

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


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
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
