"""OpenLineage events of stages, written by the client's own file transport."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.files import write_sealed_json
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.experience.record import JudgedRow
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish, read
from rft_platform.rounds.reporting.lineage_events import stage_events
from tests.experience.samples import step_row
from tests.support.records import selected

pytest.importorskip("openlineage.client", reason="needs openlineage-python: pip install 'rft-platform[openlineage]'")
STAGES = ("rollout_batches", "judged_experiences", "policy_checkpoint", "evaluation_report")
DAGSTER_RUN = str(uuid.UUID(int=7))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    taskset = {"name": "sums", "path": str(tmp_path / "sums.jsonl")}
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    config = {
        "project": "demo",
        "name": "first",
        "monitor": {"openlineage": True},
        "buffer": {"explorer_input": {"taskset": taskset, "eval_tasksets": [{**taskset, "name": "held-out"}]}},
    }
    opened = Project(Home(tmp_path / "home"), build_config(config))
    store = opened.store
    place = {"group_id": "g", "task_id": "t", "taskset": "sums"}
    store.write_rollouts(1, 0, [step_row(f"run-{run}", 0, response_ids=[3], **place) for run in range(4)])
    judged = [
        JudgedRow(row.row_id, row.group_id, row.run_id, 0, 1.0, {}, "judge-1", 0.5, "too_long" if index == 3 else None)
        for index, row in enumerate(store.rollout_rows(1))
    ]
    store.write_judged(1, "judge-1", judged)
    folder = opened.checkpoints / "global_step_2"
    lineage = {"project": "demo", **selected(store, 1)}
    manifest = {"policy_version": 2, "parent": "/base", "parent_version": 0, "weights_digest": "w2", "lineage": lineage}
    folder.mkdir(parents=True)
    write_sealed_json(folder / "manifest.json", manifest)
    publish(store, Policy(str(folder), 2, "w2", 1))
    return opened


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "events.json"
    settings = {"TYPE": "file", "LOG_FILE_PATH": str(path), "APPEND": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name}", value)
    return path


def events_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_each_stage_names_what_it_read_and_wrote(project: Project, file: Path) -> None:
    for stage in STAGES:
        with stage_events(project, stage, 1, DAGSTER_RUN, "sync_round_job"):
            pass
    found = events_in(file)
    assert [event["eventType"] for event in found] == ["START", "COMPLETE"] * len(STAGES)
    for start, complete in zip(found[::2], found[1::2], strict=True):
        check(start)
        check(complete)
        assert start["run"]["runId"] == complete["run"]["runId"]
        assert complete["run"]["facets"]["parent"]["run"]["runId"] == DAGSTER_RUN
    flows = {event["job"]["name"].removeprefix("first."): flow(event) for event in found[1::2]}
    home = project.home.root
    rollouts, judged = str(home / "rounds/r0001/rollouts"), str(home / "rounds/r0001/judged/judge-1.parquet")
    weights, tasks = str(home / "checkpoints/demo/first/global_step_2"), str(home.parent / "sums.jsonl")
    digest, selection = project.store.digest(1), str(home / "rounds/r0001/row_selection-policy.parquet")
    trained = read(project.store, 1).trained()
    assert trained is not None
    data_digest = trained.lineage["data_digest"]
    assert flows == {
        "rollout_batches": ({(tasks, None, None)}, {(rollouts, None, 4)}),
        "judged_experiences": ({(rollouts, None, 4)}, {(judged, digest, 4)}),
        "policy_checkpoint": (
            {("/base", None, None), (selection, data_digest, 3)}, {(weights, "w2", None)},
        ),
        "evaluation_report": (
            {(weights, "w2", None), (tasks, None, None)}, {(str(home / "rounds/r0001/evaluation.json"), None, None)},
        ),
    }  # fmt: skip


def test_the_event_of_a_failed_stage_has_the_error(project: Project, file: Path) -> None:
    with pytest.raises(ValueError, match="no rows"), stage_events(project, STAGES[0], 1, DAGSTER_RUN, "explore_job"):
        raise ValueError("no rows")
    _, failed = events_in(file)
    check(failed)
    assert failed["eventType"] == "FAIL" and not failed["outputs"]
    assert "no rows" in failed["run"]["facets"]["errorMessage"]["message"]
    with pytest.raises(KeyboardInterrupt), stage_events(project, STAGES[0], 1, DAGSTER_RUN, "explore_job"):
        raise KeyboardInterrupt
    assert events_in(file)[-1]["eventType"] == "ABORT"


def test_an_event_that_cannot_be_sent_does_not_end_the_stage(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "http")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__URL", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__RETRY", '{"total": 0}')
    with stage_events(project, STAGES[0], 1, DAGSTER_RUN, "explore_job"):
        done = True
    assert done and "was not sent" in caplog.text


def test_without_the_option_nothing_is_sent(project: Project, file: Path) -> None:
    silent = Project(project.home, build_config({"project": "demo", "name": "first"}))
    with stage_events(silent, STAGES[0], 1, DAGSTER_RUN, "explore_job"):
        pass
    assert not file.exists()


def flow(event: dict[str, Any]) -> tuple[set[tuple[str, Any, Any]], set[tuple[str, Any, Any]]]:
    """Inputs and outputs of an event: name, version and rows."""
    found = []
    for side, kind in (("inputs", "input"), ("outputs", "output")):
        assert all(each["namespace"] == "file" for each in event[side])
        found.append(
            {
                (
                    each["name"],
                    each["facets"].get("version", {}).get("datasetVersion"),
                    each[f"{kind}Facets"].get(f"{kind}Statistics", {}).get("rowCount"),
                )
                for each in event[side]
            }
        )
    return found[0], found[1]


def check(event: dict[str, Any]) -> None:
    """Build the event again from the package's types, whose validators check it."""
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState

    RunEvent(
        eventTime=event["eventTime"], producer=event["producer"], eventType=RunState(event["eventType"]),
        run=Run(**event["run"]), job=Job(**event["job"]),
        inputs=[InputDataset(**each) for each in event["inputs"]],
        outputs=[OutputDataset(**each) for each in event["outputs"]],
    )  # fmt: skip
    assert event["schemaURL"].startswith("https://openlineage.io/spec/")
    facets = [event["run"]["facets"], event["job"].get("facets", {})]
    facets += [each.get("facets", {}) for each in (*event["inputs"], *event["outputs"])]
    for facet in (value for named in facets for value in named.values()):
        assert facet["_schemaURL"].startswith("https://openlineage.io/spec/") and facet["_producer"]
