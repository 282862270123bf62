"""Spans that exporters of OpenTelemetry have sent to this home: kept as OTLP JSON, which ``rft import`` reads.

``RFT_HOME/received`` has a file for each day, with an export request on each line. Texts are redacted before they are
written. Spans of traces and subjects that ``rft forget`` erased are dropped.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rft_platform.cluster.local.locks import locked
from rft_platform.common.files import atomic_path
from rft_platform.common.personal_data import Redaction
from rft_platform.config.home import Home, private_files
from rft_platform.traces.imports import Imports
from rft_platform.traces.readers.base import Record
from rft_platform.traces.readers.spans import LEVELS, SUBJECTS, SpanReader

#: Attributes that name a person are kept as they are, so that ``rft forget`` finds them.
_KEPT = frozenset(SUBJECTS)


class ReceivedSpans:
    """The folder ``RFT_HOME/received``."""

    def __init__(self, home: Home) -> None:
        """Nothing is created."""
        self.root = home.received
        self._imports = Imports(home)

    def add(self, request: dict[str, Any], redaction: Redaction) -> int:
        """Store an export request; returns the number of its spans and log records that were stored.

        Raises BadTraceError or an error about its form if the request is none, and UserCodeError if the redaction
        fails.
        """
        records = _records(request)
        refused = self._refused(records)
        stored = sum(trace_id not in refused for trace_id, _ in records)
        if not stored:
            return 0
        kept = redacted(_without(request, refused), redaction)
        line = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
        with private_files():
            self.root.mkdir(parents=True, exist_ok=True)
            with locked(self.root / "lock"), (self.root / f"{datetime.now(UTC):%Y-%m-%d}.jsonl").open("ab+") as file:
                if file.tell():
                    file.seek(-1, 2)
                    line = line if file.read(1) == b"\n" else b"\n" + line  # a killed writer left a part of a line
                file.write(line + b"\n")
        return stored

    def traces_of_person(self, subject: str | None) -> set[str]:
        """The ids of the received traces of a person."""
        if subject is None or not self.root.exists():
            return set()
        with locked(self.root / "lock"):
            requests = [request for file in self._files() for request in _requests(file)]
        return {
            trace_id for request in requests for trace_id, record in _records(request) if subject in _subjects(record)
        }

    def erase(self, trace_ids: Collection[str]) -> int:
        """Erase the spans and log records of some traces; returns their number."""
        if not trace_ids or not self.root.exists():
            return 0
        erased = 0
        with private_files(), locked(self.root / "lock"):
            for file in self._files():
                requests = list(_requests(file))
                gone = sum(trace_id in trace_ids for request in requests for trace_id, _ in _records(request))
                if gone:
                    lines = [json.dumps(_without(request, trace_ids), ensure_ascii=False) for request in requests]
                    with atomic_path(file) as temp:
                        temp.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
                erased += gone
        return erased

    def _refused(self, records: Collection[tuple[str, Record]]) -> set[str]:
        """The traces among these records that were forgotten, or whose subject was."""
        forgotten = self._imports.forgotten() if self._imports.root.exists() else None
        if forgotten is None or not forgotten.digests:
            return set()
        return {
            trace_id
            for trace_id, record in records
            if any(forgotten.digest(name) in forgotten.digests for name in (trace_id, *_subjects(record)))
        }

    def _files(self) -> list[Path]:
        return sorted(self.root.glob("*.jsonl"))


def redacted(value: Any, redaction: Redaction) -> Any:
    """A part of an export request with every text of an attribute redacted; texts that are JSON stay JSON."""
    if isinstance(value, list):
        return [redacted(each, redaction) for each in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("key") in _KEPT:
        return value
    return {
        name: _redacted_text(each, redaction)
        if name == "stringValue" and isinstance(each, str)
        else redacted(each, redaction)
        for name, each in value.items()
    }


def _redacted_text(text: str, redaction: Redaction) -> str:
    if text[:1] in ("[", "{"):
        try:
            return json.dumps(redaction.value(json.loads(text), frozenset({"role", "type"})), ensure_ascii=False)
        except (ValueError, RecursionError):  # no JSON
            pass
    return redaction.text(text) or ""


def _without(request: Mapping[str, Any], trace_ids: Collection[str]) -> dict[str, Any]:
    """An export request without the spans and log records of some traces."""
    found = dict(request)
    for outer, inner, items in LEVELS:
        if outer in found:
            found[outer] = [
                {
                    **resource,
                    inner: [
                        {**scope, items: [one for one in scope.get(items) or () if one.get("traceId") not in trace_ids]}
                        for scope in resource.get(inner) or ()
                    ],
                }
                for resource in found[outer] or ()
            ]
    return found


def _records(request: Any) -> list[tuple[str, Record]]:
    return list(SpanReader().records(request))


def _subjects(record: Record) -> Iterator[str]:
    return (str(record["attributes"][name]) for name in SUBJECTS if name in record["attributes"])


def _requests(file: Path) -> Iterator[dict[str, Any]]:
    """The export requests of a file; a line that is not whole is left out."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
