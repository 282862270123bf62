"""Traces of MLflow: those of a tracking server, or JSON of ``Trace.to_dict()`` and ``Trace.to_json()``.

Feedback gives the scores. An expectation named ``expected_response``, ``expected_answer`` or ``expected_output`` is the
correction.
"""

import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rft_platform.common.errors import UserError
from rft_platform.traces.readers.base import Record, file_documents, mean_scores, seconds_of
from rft_platform.traces.readers.messages import decoded, mapping, traced_call
from rft_platform.traces.readers.trace import BadTraceError, Trace, TracedCall, main_conversation

_CALLS = ("CHAT_MODEL", "LLM")
_EXPECTED = ("expected_response", "expected_answer", "expected_output")
_PAGE = 500


class MlflowReader:
    """Reads traces of MLflow."""

    def __init__(self) -> None:
        """Links are known only for traces of a server."""
        self._pages: str | None = None

    def documents(self, source: str, experiment: str | None) -> Iterator[tuple[str, Any]]:
        """The traces of files, or of an experiment at a tracking URI."""
        if urlsplit(source).scheme in ("", "file") or Path(source).exists():
            return file_documents(source)
        if experiment is None:
            raise UserError(f"{source} is a tracking server: name the experiment by --experiment")
        return self._searched(source, experiment)

    def _searched(self, uri: str, name: str) -> Iterator[tuple[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of MLflow's own modules
            from mlflow import MlflowClient

            client = MlflowClient(uri)
            experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise UserError(f"{uri} has no experiment {name!r}")
        if uri.startswith(("http://", "https://")):
            self._pages = f"{uri.rstrip('/')}/#/experiments/{experiment.experiment_id}/traces?selectedEvaluationId="
        token = None
        while True:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its store
                page = client.search_traces([experiment.experiment_id], max_results=_PAGE, page_token=token)
            yield from ((trace.info.trace_id, trace.to_dict()) for trace in page)
            token = page.token
            if not token:
                return

    def records(self, document: Any) -> Iterable[tuple[str, Record]]:
        """One trace; several in an object ``traces``; or a row of the table that ``search_traces`` returns."""
        for one in document.get("traces") or [document]:
            trace = mapping(one.get("trace")) or one
            info = mapping(trace.get("info"))
            yield str(info.get("trace_id") or info["request_id"]), trace

    def trace(self, trace_id: str, records: list[Record]) -> Trace:
        """The trace of its info and its spans."""
        info, spans = records[-1]["info"], sorted(records[-1]["data"]["spans"], key=_start)
        if not spans:
            raise BadTraceError("has no spans")
        calls = [_call(span) for span in spans if _attribute(span, "mlflow.spanType") in _CALLS]
        calls = [call for call in calls if call.messages]
        root = next((span for span in spans if not span.get("parent_span_id", span.get("parent_id"))), spans[0])
        prompt, answer, tools = main_conversation(calls or [_call(root)])
        metadata = {**(info.get("request_metadata") or {}), **(info.get("trace_metadata") or {})}
        given = [one for one in info.get("assessments") or () if one.get("valid", True)]
        return Trace(
            trace_id, self._pages and f"{self._pages}{trace_id}", prompt, answer, tools,
            mean_scores((one["assessment_name"], (one.get("feedback") or {}).get("value")) for one in given),
            _expected(given), metadata.get("mlflow.trace.user"), _seconds(info), _duration(info),
            failed=(info.get("state") or info.get("status")) == "ERROR",
        )  # fmt: skip


def _call(span: Record) -> TracedCall:
    inputs, outputs = _attribute(span, "mlflow.spanInputs"), _attribute(span, "mlflow.spanOutputs")
    tools = _attribute(span, "mlflow.chat.tools") or mapping(inputs).get("tools")
    return traced_call(_start(span) / 1e9, inputs, outputs, tools)


def _attribute(span: Record, name: str) -> Any:
    """An attribute of a span, which MLflow stores as JSON text."""
    found = (span.get("attributes") or {}).get(name)
    if isinstance(found, str) and found[:1] == found[-1:] == '"':
        return decoded(f"[{found}]")[0]
    return decoded(found)


def _start(span: Record) -> int:
    return int(span.get("start_time_unix_nano") or span["start_time"])


def _expected(given: list[Record]) -> str | None:
    """What a person says that the answer should have been."""
    found = {one["assessment_name"]: one["expectation"].get("value") for one in given if one.get("expectation")}
    value = next((found[name] for name in _EXPECTED if found.get(name) is not None), None)
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _seconds(info: Record) -> float:
    if "timestamp_ms" in info:
        return float(info["timestamp_ms"]) / 1000
    return seconds_of(info["request_time"])


def _duration(info: Record) -> float:
    given = info.get("execution_duration_ms", info.get("execution_time_ms"))
    if given is None:
        given = 1000 * float(str(info.get("execution_duration") or "0s").removesuffix("s"))
    return float(given) / 1000
