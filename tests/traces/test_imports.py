"""Imports of traces: the datasets that they make, repeated imports, redaction, and what Dagster shows."""

import json
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from rft_platform.assets.imports import imported_traces
from rft_platform.common.errors import UserError
from rft_platform.common.personal_data import Redaction
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.jobs.reconcile_imports import reconcile_imports
from rft_platform.project_definitions import definitions_of
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.resources.project import ProjectResource
from rft_platform.tasks.dataset import load_tasks
from rft_platform.tasks.offline_dataset import Columns, load_conversations, load_pairs
from rft_platform.traces.datasets import DEMONSTRATIONS, PREFERENCES, TASKS, ScoreRule
from rft_platform.traces.imports import ImportReport, ImportRequest, Imports, import_kind, name_of, read_jsonl
from tests.traces.scenarios import scenario
from tests.traces.test_readers import COUNT, EXPORTS

NOTHING = Redaction()
#: A training on imported demonstrations.
OFFLINE: dict[str, Any] = {
    "mode": "train",
    "algorithm": {"algorithm_type": "sft"},
    "buffer": {"trainer_input": {"experience_buffer": {"path": "/home/imports/demonstrations"}}},
}


@pytest.fixture
def imports(tmp_path: Path) -> Imports:
    return Imports(Home(tmp_path / "home"))


def run(imports: Imports, file: str = "langsmith", redaction: Redaction = NOTHING, **request: Any) -> ImportReport:
    request = {"format": file, "source": str(EXPORTS / f"{file}.jsonl"), "name": file, **request}
    return imports.run(ImportRequest(**request), redaction)


def test_traces_become_tasks_demonstrations_and_pairs(imports: Imports) -> None:
    report = run(imports)
    assert (report.imported, report.bad, report.score) == (COUNT, 0, "helpful")
    # Of each six: two answers to one question (one of them worse), a tool call, a second question, a correction and a
    # failure of one question: 4 prompts; every answer but the failed one; best over worst, and the correction.
    assert report.rows == {TASKS: 12, DEMONSTRATIONS: 15, PREFERENCES: 6}
    folder = imports.root
    assert len(load_tasks(str(folder / TASKS), response_key=None).tasks) == 12
    assert [task.answer for task in load_tasks(str(folder / TASKS)).tasks] == [
        f"Yes, order {of} within 30 days." for of in range(3)
    ]
    demonstrations = load_conversations(str(folder / DEMONSTRATIONS), Columns())
    pairs = load_pairs(str(folder / PREFERENCES), Columns())
    assert (len(demonstrations.rows), len(pairs.rows)) == (15, 6)
    best = {row["chosen"][0]["content"]: row["rejected"][0]["content"] for row in pairs.rows}
    assert best["Order 2 arrives today."] == "No idea."
    assert best["Yes, order 2 within 30 days."] == "No."


def test_a_demonstration_trains_only_text_of_the_model(imports: Imports) -> None:
    run(imports)
    rows = read_jsonl(imports.file(DEMONSTRATIONS, "langsmith"))
    by_trace = {row["messages"][-1]["content"]: row for row in rows}
    with_tool, second = by_trace["Yes, order 1 left."], by_trace["In 1 days."]
    assert [message.get("weight") for message in with_tool["messages"]] == [None] * 5, "the tool call is learned, too"
    assert with_tool["tools"] == scenario(8).tools
    assert [message.get("weight") for message in second["messages"]] == [None, None, 0, None, None]
    corrected = by_trace["Yes, order 1 within 30 days."]
    assert "No." not in json.dumps(corrected["messages"])


def test_a_row_names_its_trace_and_the_link(imports: Imports) -> None:
    run(imports, "langfuse", link="https://langfuse.example/project/shop/traces/{id}")
    (origin,) = read_jsonl(imports.file(DEMONSTRATIONS, "langfuse"))[0]["imported_from"]
    trace = f"{0:032x}"
    link = f"https://langfuse.example/project/shop/traces/{trace}"
    assert origin == {"format": "langfuse", "imported_as": "langfuse", "id": trace, "link": link, "subject": "user-0"}
    pair = read_jsonl(imports.file(PREFERENCES, "langfuse"))[-1]
    assert len(pair["imported_from"]) == 2, "of the better and of the worse answer"


def test_a_repeated_import_doubles_nothing(imports: Imports) -> None:
    first = run(imports)
    before = {file: file.read_bytes() for file in imports.root.rglob("*.jsonl")}
    assert run(imports) == first
    assert {file: file.read_bytes() for file in imports.root.rglob("*.jsonl")} == before
    again = run(imports, name="again")
    assert (again.imported, again.known) == (0, {"langsmith": COUNT})
    assert {file: file.read_bytes() for file in imports.root.rglob("*.jsonl")} == before


def test_a_score_selects_demonstrations(imports: Imports) -> None:
    report = run(imports, score_rule=ScoreRule("helpful", 0.5))
    answers = [row["messages"][-1]["content"] for row in read_jsonl(imports.file(DEMONSTRATIONS, "langsmith"))]
    assert report.rows[DEMONSTRATIONS] == 9
    assert "No idea." not in answers
    assert "Yes, order 0 within 30 days." in answers, "a correction needs no score"
    with pytest.raises(UserError, match="--score kind: the traces have the scores helpful"):
        run(imports, score_rule=ScoreRule("kind"))


def test_texts_are_redacted_before_they_are_stored(imports: Imports) -> None:
    redaction = Redaction(lambda text: re.sub(r"[Oo]rder \d+", "[order]", text))
    report = run(imports, redaction=redaction)
    assert report.redacted == COUNT
    texts = [file.read_text() for file in imports.root.rglob("*") if file.is_file() and file.name != "key"]
    assert not [text for text in texts if re.search(r"[Oo]rder \d", text)]
    assert any("[order]" in text for text in texts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "jaeger"}, "--format jaeger: expected one of langfuse, langsmith, mlflow, otel"),
        (
            {"format": "otel"},
            "none of 51 records is a trace of the format otel; the first: langsmith.jsonl:1: is no OTLP",
        ),
        ({"name": "My Import"}, "--name My Import: expected lower-case"),
        ({"source": "absent.jsonl"}, "absent.jsonl: no such file"),
        ({"link": "https://here"}, "expected {id} where"),
        ({"format": "mlflow", "source": "http://127.0.0.1:1"}, "name the experiment by --experiment"),
    ],
)
def test_a_wrong_request_is_refused(imports: Imports, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        run(imports, **change)


def test_names() -> None:
    assert name_of("/data/June 2026.jsonl") == "june-2026"
    assert name_of("http://mlflow.example:5000") == "mlflow.example-5000"
    assert import_kind("/home/.rft/imports/tasks") == TASKS
    assert import_kind("/home/.rft/imports/demonstrations/train-june.jsonl") == DEMONSTRATIONS
    assert import_kind("/home/imports/chats.jsonl") is None
    assert import_kind(None) is None


@pytest.mark.slow
def test_dagster_has_a_partition_for_each_import(imports: Imports, tmp_path: Path) -> None:
    home, key = Home(tmp_path / "home"), dg.AssetKey("imported_traces")
    run(imports)
    run(imports, "langfuse")
    with dg.DagsterInstance.ephemeral() as instance:
        assert reconcile_imports(home, instance) == ["langfuse", "langsmith"]
        assert reconcile_imports(home, instance) == [], "Dagster knows these rows"
        assert instance.get_materialized_partitions(key) == {"langfuse", "langsmith"}
        run(imports, "langfuse", score_rule=ScoreRule("helpful", 0.5))
        assert reconcile_imports(home, instance) == ["langfuse"]
        found = instance.get_latest_materialization_event(key)
    assert found is not None and found.asset_materialization is not None
    metadata = found.asset_materialization.metadata
    assert metadata["traces"].value == COUNT
    assert "order" not in str(metadata), "no text of a trace"


@pytest.mark.slow
def test_the_asset_imports_its_partition(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    home.config_file.write_text(json.dumps(OFFLINE | {"service": {"redaction": f"{tmp_path}/privacy.py:redact"}}))
    (tmp_path / "privacy.py").write_text("def redact(text):\n    return text.replace('order', '[order]')\n")
    config = {"format": "langfuse", "source": str(EXPORTS / "langfuse.jsonl"), "min_score": 0.5}
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(str(PLAIN_NAMES.imports.name), ["june"])
        done = dg.materialize(
            [imported_traces.of(PLAIN_NAMES)],
            instance=instance,
            partition_key="june",
            resources={"project": ProjectResource(home=str(home.root))},
            run_config={"ops": {"imported_traces": {"config": config}}},
        )
        assert done.success
        assert reconcile_imports(home, instance) == [], "Dagster knows these rows"
    report = Imports(home).report("june")
    assert (report.imported, report.score, report.redacted) == (COUNT, "helpful", COUNT)


def test_datasets_that_read_an_import_depend_on_its_asset(tmp_path: Path) -> None:
    def parents(config: dict[str, Any], asset: str) -> set[str]:
        graph = definitions_of(build_config(config)).resolve_asset_graph()
        return {key.to_user_string() for key in graph.get(dg.AssetKey(asset)).parent_keys}

    assert parents(OFFLINE, "sft_dataset") == {"imported_traces"}
    assert "imported_traces" not in parents(OFFLINE, "eval_task_dataset")
    elsewhere = {"trainer_input": {"experience_buffer": {"path": "chats.jsonl"}}}
    assert parents(OFFLINE | {"buffer": elsewhere}, "sft_dataset") == set()
    explored = {"buffer": {"explorer_input": {"taskset": {"path": "/home/imports/tasks", "judge": "a:b"}}}}
    assert parents(explored, "task_dataset") == {"imported_traces"}
