"""Exports of Langfuse: traces with observations and scores, or observations, traces and scores as separate records.

The first is what ``GET /api/public/traces/ID`` returns. The others are the pages of the API's lists, the JSON files of
the interface's export, and those of a scheduled export to blob storage, whose keys have underscores.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rft_platform.traces.readers.base import Record, file_documents, mean_scores, seconds_of
from rft_platform.traces.readers.messages import mapping, traced_call
from rft_platform.traces.readers.trace import BadTraceError, Trace, TracedCall, main_conversation

_CALL = "GENERATION"
_CORRECTION = "CORRECTION"


class LangfuseReader:
    """Reads exports of Langfuse."""

    def documents(self, source: str, experiment: str | None) -> Iterator[tuple[str, Any]]:
        """The documents of the files."""
        return file_documents(source)

    def records(self, document: Any) -> Iterable[tuple[str, Record]]:
        """Traces, observations and scores; a page of a list has them in ``data``."""
        listed = document.get("data")
        for one in listed if isinstance(listed, list) else [document]:
            yield from _parts(_camel(one))

    def trace(self, trace_id: str, records: list[Record]) -> Trace:
        """The trace of its records."""
        observations = sorted((one for one in records if "startTime" in one), key=lambda one: str(one["startTime"]))
        scores = [one for one in records if _is_score(one)]
        whole = next((one for one in records if one not in scores and one not in observations), None)
        root = whole or next((one for one in observations if not one.get("parentObservationId")), None)
        if root is None:
            raise BadTraceError("has scores, and neither a trace nor an observation")
        calls = [_call(one) for one in observations if one.get("type") == _CALL]
        calls = [call for call in calls if call.messages] or [_call(root)]
        prompt, answer, tools = main_conversation(calls)
        times = [_seconds(one) for one in (root, *observations)]
        ends = [seconds_of(one["endTime"]) for one in observations if one.get("endTime")]
        subjects = (one["userId"] for one in (root, *observations) if one.get("userId"))
        return Trace(
            trace_id, _link(root, trace_id), prompt, answer, tools,
            mean_scores((one["name"], one.get("value")) for one in scores if _is_number(one)),
            next((text for one in scores if (text := _corrected(one))), None),
            next(subjects, None), min(times), max(ends, default=min(times)) - min(times),
            failed=any(one.get("level") == "ERROR" for one in observations if not one.get("parentObservationId")),
        )  # fmt: skip


def _parts(one: dict[str, Any]) -> Iterator[tuple[str, Record]]:
    if _is_score(one):
        subject = mapping(one.get("subject"))
        trace_id = one.get("traceId") or subject.get("traceId") or subject.get("id")
        if trace_id is not None and subject.get("kind") not in ("session", "experiment"):
            yield str(trace_id), one
    elif "startTime" in one:
        yield str(one["traceId"]), one
    elif "id" in one and "timestamp" in one:
        yield str(one["id"]), {name: value for name, value in one.items() if name not in ("observations", "scores")}
        for part in (*(one.get("observations") or ()), *_listed_scores(one)):
            if isinstance(part, Mapping):
                yield str(one["id"]), _camel(part)
    else:
        raise BadTraceError("is no trace, observation or score of Langfuse")


def _listed_scores(one: Record) -> Iterable[Any]:
    """The scores of a trace; the interface's export has them as values by name."""
    scores = one.get("scores") or ()
    if not isinstance(scores, Mapping):
        return scores
    values = {name: value[0] if isinstance(value, list) and value else value for name, value in scores.items()}
    return [{"name": name, "value": value, "dataType": "NUMERIC"} for name, value in values.items()]


def _is_score(one: Record) -> bool:
    return "value" in one and "name" in one and "startTime" not in one


def _is_number(one: Record) -> bool:
    """Whether the value is a score; that of a category is its number, and that of a correction is 0 or its text."""
    kind = one.get("dataType", "CATEGORICAL" if one.get("stringValue") else None)
    return kind not in ("CATEGORICAL", _CORRECTION)


def _corrected(one: Record) -> str | None:
    """The text of a correction: version 3 of the API has it as the value; others have 0 there, and the text beside."""
    text = one.get("stringValue") or one["value"]
    return text if one.get("dataType") == _CORRECTION and isinstance(text, str) else None


def _call(one: Record) -> TracedCall:
    tools = mapping(one.get("input")).get("tools") or mapping(one.get("modelParameters")).get("tools")
    return traced_call(_seconds(one), one.get("input"), one.get("output"), tools)


def _link(root: Record, trace_id: str) -> str | None:
    """The page of the trace; without the server's address, because exports lack it."""
    if root.get("htmlPath"):
        return str(root["htmlPath"])
    return f"/project/{root['projectId']}/traces/{trace_id}" if root.get("projectId") else None


def _seconds(one: Record) -> float:
    return seconds_of(one.get("startTime") or one["timestamp"])


def _camel(one: Any) -> dict[str, Any]:
    """The record with keys such as ``traceId``; blob storage has ``trace_id``."""
    return {re.sub(r"_([a-z])", lambda match: match[1].upper(), name): value for name, value in one.items()}
