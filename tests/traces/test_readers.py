"""Every reader gives the same traces of the same conversations: one conformance suite for all formats."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.personal_data import Redaction
from rft_platform.config.home import Home
from rft_platform.traces.imports import ImportRequest, Imports
from rft_platform.traces.readers.base import read_traces
from rft_platform.traces.readers.formats import FORMATS
from rft_platform.traces.readers.mlflow_traces import MlflowReader
from rft_platform.traces.readers.trace import BadTrace, Trace
from tests.support.mlflow_recording import recording, store_in
from tests.traces.scenarios import SYSTEM, Scenario, scenario

EXPORTS = Path(__file__).parent / "exports"
COUNT = 18  # conversations in each file
#: The files that each library made (``make_exports.py``); MLflow is installed and makes its own.
FILES = {
    "otel": "otel.jsonl", "langsmith": "langsmith.jsonl", "langfuse": "langfuse.jsonl",
    "langfuse, version 1": "langfuse-traces.jsonl", "mlflow": "mlflow.jsonl",
}  # fmt: skip


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each format."""
    folder = tmp_path_factory.mktemp("exports")
    for file in EXPORTS.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    lines = [json.dumps(trace) for trace in mlflow_traces(folder, COUNT)]
    (folder / "mlflow.jsonl").write_text("\n".join(lines))
    return folder


def mlflow_traces(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Traces that MLflow recorded in a new store below ``folder``, as ``Trace.to_dict`` gives them."""
    record_in_mlflow(folder, "shop", count)
    return (document for _, document in FORMATS["mlflow"]().documents(store_in(folder), "shop"))


def record_in_mlflow(folder: Path, experiment: str, count: int) -> None:
    """Record the first conversations as traces of an experiment."""
    with recording(folder, experiment) as (mlflow, experiment_id):
        from mlflow.entities import AssessmentSource

        source = AssessmentSource("HUMAN", "ann")
        for one in map(scenario, range(count)):
            given = {"trace_id": _record(mlflow, experiment_id, one), "source": source}
            if one.helpful is not None:
                mlflow.log_feedback(**given, name="helpful", value=one.helpful)
            if one.correction is not None:
                mlflow.log_expectation(**given, name="expected_response", value=one.correction)


def _record(mlflow: Any, experiment_id: str, one: Scenario) -> str:
    at = one.started_at * 10**9
    root = mlflow.start_span_no_context(
        "shop", span_type="AGENT", inputs={"question": one.calls[0][0][-1]["content"]}, start_time_ns=at,
        metadata={"mlflow.trace.user": one.user} if one.user else {}, experiment_id=experiment_id,
    )  # fmt: skip
    for index, (messages, answer) in enumerate(one.calls):
        asked = {"messages": messages, "model": "tiny", **({"tools": one.tools} if one.tools else {})}
        span = mlflow.start_span_no_context(
            "chat", span_type="CHAT_MODEL", parent_span=root, inputs=asked, start_time_ns=at + (2 * index + 1) * 10**9
        )
        span.end(outputs={"choices": [{"message": answer}]}, end_time_ns=at + (2 * index + 2) * 10**9)
    status = "ERROR" if one.failed else "OK"
    root.end(outputs=one.calls[-1][1]["content"], status=status, end_time_ns=at + 9 * 10**9)
    return str(root.trace_id)


def read(name: str, source: Path | str, experiment: str | None = None) -> list[Trace | BadTrace]:
    return list(read_traces(FORMATS[name.partition(",")[0]](), str(source), experiment))


def in_order(found: list[Trace | BadTrace]) -> list[Trace]:
    traces = [one for one in found if isinstance(one, Trace)]
    assert traces == found, [one for one in found if isinstance(one, BadTrace)]
    return sorted(traces, key=lambda trace: trace.started_at)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_reader_gives_the_conversation(name: str, exports: Path) -> None:
    traces = in_order(read(name, exports / FILES[name]))
    assert len({trace.trace_id for trace in traces}) == len(traces) == COUNT
    for trace, one in zip(traces, map(scenario, range(COUNT)), strict=True):
        messages, answer = one.calls[-1]
        assert [*trace.prompt, *trace.answer] == [*messages, answer]
        assert trace.prompt == one.calls[0][0], "what the agent was given, without its own tool calls"
        assert trace.prompt[0] == SYSTEM
        assert trace.scores == ({} if one.helpful is None else {"helpful": one.helpful})
        assert trace.subject == one.user
        assert trace.failed == one.failed
        assert [tool["function"]["name"] for tool in trace.tools] == [tool["function"]["name"] for tool in one.tools]
        assert trace.tools == one.tools
        if name not in ("otel", "langfuse, version 1"):  # these formats have no corrections
            assert trace.correction == one.correction
        assert abs(trace.started_at - one.started_at) <= 1
        assert trace.duration_s <= 10


@pytest.mark.parametrize("column", ["stringValue", "string_value"])
def test_a_correction_of_langfuse_beside_the_value_0_is_a_text_and_no_score(column: str, tmp_path: Path) -> None:
    """As version 1 and 2 of the API and the export to blob storage have it."""
    at = "2026-01-01T00:00:00Z"
    call = {"id": "o", "traceId": "t", "type": "GENERATION", "startTime": at, "input": "Capital of France?"}
    score = {"id": "s", "traceId": "t", "name": "output", "dataType": "CORRECTION", "value": 0, "timestamp": at}
    lines = (json.dumps(record) for record in ({**call, "output": "Lyon"}, {**score, column: "Paris"}))
    (tmp_path / "traces.jsonl").write_text("\n".join(lines))
    (trace,) = in_order(read("langfuse", tmp_path / "traces.jsonl"))
    assert (trace.correction, trace.scores) == ("Paris", {})


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_line_and_a_foreign_record_are_reported(name: str, exports: Path, tmp_path: Path) -> None:
    lines = (exports / FILES[name]).read_text().splitlines()
    strange = ['{"half": ', '{"foreign": 1}', "[1, null]", '"text"']
    (tmp_path / "mixed.jsonl").write_text("\n".join([*lines[:3], *strange, *lines[3:]]))
    found = read(name, tmp_path / "mixed.jsonl")
    bad = [one for one in found if isinstance(one, BadTrace)]
    assert len([one for one in found if isinstance(one, Trace)]) == COUNT
    assert {one.trace_id for one in bad} == {f"mixed.jsonl:{line}" for line in range(4, 8)}
    assert all(one.reason for one in bad)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_thousand_traces_are_imported_once(name: str, exports: Path, tmp_path: Path) -> None:
    """Copies of the library's traces under other ids: none is lost, and a repetition doubles none."""
    text, format = (exports / FILES[name]).read_text(), name.partition(",")[0]
    ids = [trace.trace_id for trace in in_order(read(name, exports / FILES[name]))]
    with (tmp_path / "many.jsonl").open("w") as file:
        for copy in range(-(-1000 // COUNT)):
            changed = text
            for one in ids:
                changed = changed.replace(one, f"{copy:03d}-{one}")
            file.write(changed.strip() + "\n")
    imports = Imports(Home(tmp_path / "home"))
    request = ImportRequest("many", format, str(tmp_path / "many.jsonl"))
    first = imports.run(request, Redaction())
    assert (first.imported, first.bad, first.repeated) == (COUNT * 56, 0, 0)
    before = {file: file.read_bytes() for file in imports.root.rglob("*.jsonl")}
    assert imports.run(request, Redaction()) == first
    again = imports.run(replace(request, name="again"), Redaction())
    assert (again.imported, again.known) == (0, {"many": COUNT * 56})
    assert {file: file.read_bytes() for file in imports.root.rglob("*.jsonl")} == before


@pytest.mark.parametrize(
    ("value", "text"), [("Bern", "Bern"), ({"city": "Bern", "ok": True}, '{"city": "Bern", "ok": true}')]
)
def test_an_expected_response_of_mlflow_that_is_no_text_becomes_json(value: Any, text: str) -> None:
    given = [{"assessment_name": "expected_response", "expectation": {"value": value}}]
    asked = {"mlflow.spanType": "LLM", "mlflow.spanInputs": {"messages": [{"role": "user", "content": "?"}]}}
    answered = {"mlflow.spanOutputs": {"choices": [{"message": {"role": "assistant", "content": "Rome"}}]}}
    spans = [{"start_time_unix_nano": 1, "attributes": {**asked, **answered}}]
    record = {"info": {"trace_id": "t", "timestamp_ms": 1, "assessments": given}, "data": {"spans": spans}}
    assert MlflowReader().trace("t", [record]).correction == text
