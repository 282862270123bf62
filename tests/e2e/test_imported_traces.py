"""Traces of an agent become a better model, which leads back to them, and forgotten ones are gone everywhere."""

import json
from typing import Any

import dagster as dg
import pytest

from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance
from tests.e2e.test_offline import ADDITIONS, offline
from tests.online.test_forget import files_with
from tests.support.builders import write_rows
from tests.support.mlflow_recording import recording, store_in

pytestmark = pytest.mark.slow

SUBJECT, TEXT = "ann.quillfeather", "Mrs Quillfeather asks 3+4="


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """MLflow's store with a trace of each addition, and the ids of its traces by question."""
    folder, traces = tmp_path_factory.mktemp("mlflow"), dict[str, str]()
    questions = {TEXT: 7} | {f"{a}+{b}=": a + b for a, b in ADDITIONS}
    with recording(folder, "additions") as (mlflow, experiment):
        for number, (question, total) in enumerate(questions.items()):
            user = SUBJECT if question == TEXT else f"user-{number}"
            root = mlflow.start_span_no_context(
                "agent", span_type="CHAT_MODEL", inputs={"messages": [{"role": "user", "content": question}]},
                metadata={"mlflow.trace.user": user}, start_time_ns=(number + 1) * 10**9, experiment_id=experiment,
            )  # fmt: skip
            root.end(outputs={"choices": [{"message": {"role": "assistant", "content": str(total)}}]})
            traces[question] = root.trace_id
    return store_in(folder), traces


@pytest.fixture(scope="module")
def trained(make_project: Any, recorded: tuple[str, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Supervised fine-tuning on the imported demonstrations."""
    folder = tmp_path_factory.mktemp("held-out")
    held_out = write_rows(folder / "held_out.jsonl", [{"question": f"{a}+7=", "answer": str(a + 7)} for a in range(4)])
    project = make_project("traces", **offline("to be imported", {"algorithm_type": "sft"}, 60, held_out))
    demonstrations = project.home / "imports" / "demonstrations"
    project.config.write_text(project.config.read_text().replace("to be imported", str(demonstrations)))
    imported = project.json(
        "import", recorded[0], "--format", "mlflow", "--experiment", "additions", "--name", "live",
        "--link", "https://mlflow.example/{id}",
    )  # fmt: skip
    assert (imported["imported"], imported["bad"]) == (len(ADDITIONS) + 1, 0)
    project.rft("run", "--config", str(project.config))
    return project


def test_the_held_out_figure_rises(trained: Any) -> None:
    before, after = (trained.note(number, "evaluation")["results"][0]["mean_reward"] for number in (0, 1))
    assert after > before + 0.1


def test_the_weights_lead_back_to_the_traces(trained: Any, recorded: tuple[str, dict[str, str]]) -> None:
    (training,) = trained.json("trace", "models:/small-e2e/1", "--verify")["trainings"]
    assert {one["id"] for one in training["imported"]} == set(recorded[1].values())
    assert {one["link"] for one in training["imported"]} == {
        f"https://mlflow.example/{trace}" for trace in recorded[1].values()
    }
    shown = trained.rft("trace", "r0001", "--all").stdout
    assert f"imported from {len(ADDITIONS) + 1} traces" in " ".join(shown.split())
    assert f"https://mlflow.example/{recorded[1][TEXT]}" in shown


def test_dagster_shows_the_import_and_what_depends_on_it(trained: Any) -> None:
    key = dg.AssetKey("imported_traces")
    with open_instance(Home(trained.home)) as instance:
        assert instance.get_dynamic_partitions("rft_import") == ["live"]
        assert instance.get_materialized_partitions(key) == {"live"}
        run = instance.get_runs()[0]
        events = instance.fetch_materializations(dg.AssetKey("sft_dataset"), limit=1).records
    assert run.status.value == "SUCCESS"
    assert events[0].asset_materialization is not None


def test_forgotten_traces_are_gone_everywhere(trained: Any, recorded: tuple[str, dict[str, str]]) -> None:
    uri, traces = recorded
    assert files_with(trained.home, TEXT)
    found = trained.json("forget", "--subject", SUBJECT)
    assert found["rounds"] == [1]
    assert [ref["model_version"] for ref in found["trained"]] == [1]
    for text in (SUBJECT, TEXT, traces[TEXT]):
        assert files_with(trained.home, text) == [], text
    policy = json.loads((trained.home / "rounds" / "r0001" / "policy-policy.json").read_text())
    assert policy["canary"] is None
    other = trained.json("import", uri, "--format", "mlflow", "--experiment", "additions", "--name", "again")
    assert (other["imported"], other["known"], other["forgotten"]) == (0, {"live": len(ADDITIONS)}, 1)
    assert files_with(trained.home, TEXT) == []
    (training,) = trained.json("trace", "r0001", "--verify")["trainings"]
    assert training["data_unchanged"] is True
    assert {one["id"] for one in training["imported"]} == set(traces.values()) - {traces[TEXT]}
    assert "finished" in trained.rft("run", "--config", str(trained.config)).stdout
