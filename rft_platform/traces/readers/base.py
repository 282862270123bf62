"""What a reader of a format is, and how it is driven: records of a source, grouped by trace, become traces.

A new format is one class with ``records`` and ``trace``, listed in ``readers.formats``.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rft_platform.common.errors import UserError
from rft_platform.tasks.readers import read_rows
from rft_platform.traces.readers.trace import BadTrace, BadTraceError, Trace

Record: TypeAlias = Mapping[str, Any]
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv")
#: What reading a record of an unexpected form may raise.
UNREADABLE = (
    BadTraceError, UserError, LookupError, TypeError, ValueError, AttributeError, StopIteration, RecursionError,
)  # fmt: skip


class TraceReader(Protocol):
    """Reads one format. Each import creates one."""

    def documents(self, source: str, experiment: str | None) -> Iterator[tuple[str, Any]]:
        """What the source holds, each with its place; an exception in place of what is not readable.

        ``file_documents`` reads files. Raises UserError if there is no such source.
        """
        ...

    def records(self, document: Any) -> Iterable[tuple[str, Record]]:
        """The records of a document, each with the id of its trace."""
        ...

    def trace(self, trace_id: str, records: list[Record]) -> Trace:
        """The trace of these records. Raises BadTraceError if it cannot be one."""
        ...


def read_traces(reader: TraceReader, source: str, experiment: str | None = None) -> Iterator[Trace | BadTrace]:
    """All traces of a source, and what is known of those that are not readable. Raises UserError without a source."""
    grouped: dict[str, list[Record]] = defaultdict(list)
    for place, document in reader.documents(source, experiment):
        try:
            if isinstance(document, Exception):
                raise document
            for trace_id, record in reader.records(document):
                grouped[trace_id].append(record)
        except UNREADABLE as error:
            yield BadTrace(place, _reason(error))
    for trace_id, records in grouped.items():
        try:
            yield reader.trace(trace_id, records)
        except UNREADABLE as error:
            yield BadTrace(trace_id, _reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, BadTraceError | UserError | json.JSONDecodeError):
        return str(error)
    named = f" {error}" if isinstance(error, KeyError) else ""  # other messages may quote texts of the trace
    return f"has another form than expected: {type(error).__name__}{named}"


def file_documents(source: str) -> Iterator[tuple[str, Any]]:
    """The JSON documents of a file or of all files of a folder: a line of JSON Lines, a row, an element of a list."""
    path = Path(source).expanduser()
    files = sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES) if path.is_dir() else [path]
    if not files or not path.exists():
        raise UserError(f"{source}: no such file, nor a folder with files that end in {', '.join(_SUFFIXES)}")
    for file in files:
        for place, document in _documents(file):
            elements = document if isinstance(document, list) else [document]
            yield from ((place, element) for element in elements)


def _documents(file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix in (".parquet", ".csv"):
        yield from ((f"{file.name}:{number}", row) for number, row in read_rows(file))
        return
    if file.suffix == ".json":
        try:
            yield file.name, json.loads(file.read_bytes())
            return
        except (ValueError, RecursionError) as error:
            if b"\n" not in file.read_bytes().strip():
                yield file.name, error
                return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{file.name}:{number}", _parsed(line)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return error


def seconds_of(time: Any) -> float:
    """Seconds since 1970 of a time as ISO text, which is in UTC if it names no zone."""
    found = datetime.fromisoformat(str(time))
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def mean_scores(scores: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """The mean of each score by name; true is 1, yes and pass are 1, no and fail are 0, other texts do not count."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in scores:
        number = _WORDS.get(value.strip().lower()) if isinstance(value, str) else value
        if isinstance(number, bool | int | float):
            found[name].append(float(number))
    return {name: sum(values) / len(values) for name, values in found.items()}


_WORDS = {"yes": 1.0, "true": 1.0, "pass": 1.0, "no": 0.0, "false": 0.0, "fail": 0.0}
