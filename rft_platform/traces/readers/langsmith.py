"""Exports of LangSmith: runs, as JSON, JSON Lines or the Parquet of a bulk export, perhaps with feedback.

Runs are what ``Client.list_runs`` returns. Feedback is a separate record (``Client.list_feedback``), a list
``feedback`` in a run, or the means in ``feedback_stats``.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from rft_platform.traces.readers.base import Record, file_documents, mean_scores, seconds_of
from rft_platform.traces.readers.messages import decoded, mapping, messages_of, traced_call
from rft_platform.traces.readers.trace import BadTraceError, Trace, TracedCall, main_conversation

_SERVER = "https://smith.langchain.com"
_SUBJECTS = ("user_id", "user", "ls_user_id")


class LangsmithReader:
    """Reads exports of LangSmith."""

    def __init__(self) -> None:
        """Feedback may name only its run, so the runs that were read before are known by their traces."""
        self._traces: dict[str, str] = {}

    def documents(self, source: str, experiment: str | None) -> Iterator[tuple[str, Any]]:
        """The documents of the files; those of feedback last."""
        later = []
        for place, document in file_documents(source):
            if isinstance(document, dict) and _is_feedback(document):
                later.append((place, document))
            else:
                yield place, document
        yield from later

    def records(self, document: Any) -> Iterable[tuple[str, Record]]:
        """Runs with their children, and feedback."""
        if _is_feedback(document):
            run = str(document["run_id"])
            yield str(document.get("trace_id") or self._traces.get(run, run)), document
            return
        if "run_type" not in document:
            raise BadTraceError("is no run or feedback of LangSmith")
        trace_id = str(document.get("trace_id") or str(document.get("dotted_order") or "").split(".")[0][-36:])
        trace_id = trace_id or str(document["id"])
        self._traces[str(document["id"])] = trace_id
        yield trace_id, document
        for child in document.get("child_runs") or ():
            yield from self.records({**child, "trace_id": trace_id})
        for feedback in document.get("feedback") or ():
            yield trace_id, {"run_id": document["id"], **feedback}

    def trace(self, trace_id: str, records: list[Record]) -> Trace:
        """The trace of its runs."""
        runs = {str(one["id"]): one for one in records if "run_type" in one}  # a run that was read twice counts once
        feedback = list(
            {one.get("id", number): one for number, one in enumerate(records) if _is_feedback(one)}.values()
        )
        if not runs:
            raise BadTraceError("has feedback, and no run")
        ordered = sorted(runs.values(), key=lambda one: str(one["start_time"]))
        root = next((run for run in ordered if not run.get("parent_run_id")), ordered[0])
        calls = [_call(run) for run in ordered if run["run_type"] == "llm"]
        prompt, answer, tools = main_conversation([call for call in calls if call.messages] or [_call(root)])
        ends = [seconds_of(run["end_time"]) for run in ordered if run.get("end_time")]
        start = seconds_of(ordered[0]["start_time"])
        return Trace(
            trace_id, _link(root), prompt, answer, tools, _scores(feedback, root), _correction(feedback),
            _subject(root), start, max(ends, default=start) - start, failed=bool(root.get("error")),
        )  # fmt: skip


def _is_feedback(one: Record) -> bool:
    return "run_id" in one and "key" in one


def _call(run: Record) -> TracedCall:
    parameters = mapping(mapping(run.get("extra")).get("invocation_params"))
    tools = parameters.get("tools") or mapping(run.get("inputs")).get("tools")
    return traced_call(seconds_of(run["start_time"]), run.get("inputs"), run.get("outputs"), tools)


def _scores(feedback: list[Record], root: Record) -> dict[str, float]:
    if feedback:
        return mean_scores(
            (one["key"], one["score"] if one.get("score") is not None else one.get("value")) for one in feedback
        )
    return mean_scores((name, mapping(found).get("avg")) for name, found in mapping(root.get("feedback_stats")).items())


def _correction(feedback: list[Record]) -> str | None:
    found = next((decoded(one["correction"]) for one in feedback if one.get("correction")), None)
    return None if found is None else str(messages_of(found, "assistant")[-1]["content"])


def _subject(root: Record) -> str | None:
    metadata = mapping(mapping(root.get("extra")).get("metadata"))
    return next((str(metadata[name]) for name in _SUBJECTS if metadata.get(name)), None)


def _link(root: Record) -> str | None:
    path = root.get("url") or root.get("app_path")
    return f"{_SERVER}{path}" if path and str(path).startswith("/") else path
