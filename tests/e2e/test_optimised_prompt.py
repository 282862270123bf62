"""A model that follows its system prompt: the prompt is found, then the rounds, and one report compares them."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance
from tests.judging.conftest import JudgeServer
from tests.support.builders import write_rows

pytestmark = pytest.mark.slow

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
START, WORSE, BETTER = "Answer.", "Answer in words.", "Answer in digits."
KEY = "sk-reflect-0123456789"
TURNS = {START: 0.35, WORSE: 0.0, BETTER: 1.0}  # share of the demonstrations that answer with digits


def demonstrations() -> list[dict[str, Any]]:
    """Conversations of an assistant that writes numbers as its system prompt says."""
    rows = []
    for prompt, share in TURNS.items():
        for ask in ("Write", "Say"):
            for number, name in enumerate(NAMES):
                for copy in range(20):
                    messages = [
                        {"role": "system", "content": prompt},
                        {"role": "user", "content": f"{ask} {name}."},
                        {"role": "assistant", "content": str(number) if copy < 20 * share else name},
                    ]
                    rows.append({"messages": messages})
    return rows


def tasks(ask: str) -> list[dict[str, str]]:
    return [{"question": f"{ask} {name}.", "answer": str(number)} for number, name in enumerate(NAMES)]


def proposed(question: str) -> str:
    """What the reflection model proposes: at first something worse, then what the expected answers show."""
    assert "expected answer" in question and "Write " in question and "reward" in question
    return f"The answers were not as expected.\n```\n{proposed.later.pop(0) if proposed.later else BETTER}\n```"


@pytest.fixture(scope="module")
def reflection() -> Iterator[JudgeServer]:
    proposed.later = [WORSE]
    server = JudgeServer(proposed)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def searched(make_project: Any, reflection: JudgeServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A project whose first command was ``rft prompt optimise``."""
    folder = tmp_path_factory.mktemp("numbers")
    form = {"format": {"system_prompt": START}, "judge": "exact_match"}
    project = make_project(
        "prompts",
        buffer={
            "batch_size": 12, "train_batch_size": 96, "total_steps": 4,
            "explorer_input": {
                "taskset": {"path": write_rows(folder / "tasks.jsonl", tasks("Write")), **form},
                "eval_tasksets": [{"path": write_rows(folder / "said.jsonl", tasks("Say")), **form}],
            },
        },
        algorithm={"algorithm_type": "grpo", "repeat_times": 16, "optimizer": {"lr": 1e-3}},
        warm_start={
            "path": write_rows(folder / "demonstrations.jsonl", demonstrations()),
            "batch_size": 48, "steps": 120, "optimizer": {"lr": 3e-3, "lr_warmup_steps": 5},
        },
        evaluation={"sampled_n": 8},
        prompt_search={
            "reflection": {"model": {**reflection.model, "api_key_env": "REFLECTION_KEY"}},
            "tasks": 12, "runs": 80, "minibatch": 4,
        },
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFLECTION_KEY", KEY)
        project.search = project.json("prompt", "optimise", "--config", str(project.config))
    return project


def test_the_best_prompt_passes_the_gate_on_the_held_out_tasks(searched: Any, reflection: JudgeServer) -> None:
    found = searched.search
    assert [point["text"] for point in found["points"]] == [START, BETTER]
    start, best = (point["result"]["sampled"]["value"] for point in found["points"])
    assert start < 0.6 < 0.9 < best
    assert found["decision"]["passed"] and found["decision"]["reason"].startswith("sampled_pass")
    assert found["tried"] == 2 and 80 <= found["runs"] <= 92
    assert reflection.calls >= 2


def test_the_prompt_is_registered_with_its_lineage(searched: Any) -> None:
    from rft_platform.model_registry.mlflow_client import open_client

    name, number = searched.search["address"].removeprefix("prompts:/").split("/")
    client = open_client(f"sqlite:///{searched.home}/mlflow/mlflow.db")
    version = client.get_prompt_version(name, number)
    assert version.template == BETTER
    assert client.get_prompt_version_by_alias(name, "champion").version == version.version
    policy = json.loads((searched.home / "rounds" / "r0000" / "policy-policy.json").read_text())
    assert version.tags["weights_digest"] == policy["weights_digest"]
    assert version.tags["reflection_model"].startswith("grader at http://127.0.0.1:")
    assert version.tags["optimiser_settings"] == "tasks 12, runs 80, minibatch 4, seed 7"
    assert {"judge_version", "dataset_digest", "search_tasks_digest", "held_out_digest", "code"} < set(version.tags)
    assert float(version.tags["sampled_pass"]) > 0.9


def test_dagster_has_the_asset_with_its_report(searched: Any) -> None:
    with open_instance(Home(searched.home)) as instance:
        (run,) = instance.get_runs(dg.RunsFilter(job_name="prompt_job"))
        record = instance.fetch_materializations(dg.AssetKey("optimised_prompt"), limit=1).records[0]
    assert run.status.value == "SUCCESS" and record.asset_materialization is not None
    shown = record.asset_materialization.metadata
    assert shown["prompt"].value == BETTER and shown["better"].value is True
    assert "no round was evaluated yet" in str(shown["summary"].value)


def test_the_key_of_the_reflection_model_is_stored_nowhere(searched: Any) -> None:
    files = [file for file in searched.home.rglob("*") if file.is_file()]
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def test_after_the_rounds_the_report_shows_both_curves(searched: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFLECTION_KEY", KEY)
        searched.rft("run", "--config", str(searched.config))
    lines = searched.rft("prompt", "report").stdout.splitlines()
    assert lines[0].startswith("the prompt alone gives ") and ", 4 rounds give " in lines[0]
    page = (searched.home / "prompts" / "report.md").read_text()
    assert (searched.home / "prompts" / "learning_curve.png").stat().st_size > 10_000
    rows = [
        line for line in page.splitlines() if line.startswith(("| start |", "| round ", "| prompt 1 ", "| starting"))
    ]
    assert [row.split("|")[1].strip() for row in rows] == [
        "starting prompt", "prompt 1", "start", "round 1", "round 2", "round 3", "round 4",
    ]  # fmt: skip
    assert rows[2].split("|")[2].strip() == "0" and rows[6].split("|")[2].strip() == f"{4 * 12 * 16:,}"


def test_a_search_that_finds_nothing_better_registers_nothing(searched: Any, tmp_path: Path) -> None:
    from rft_platform.model_registry.mlflow_client import open_client

    changed = tmp_path / "rft.yaml"
    config = yaml.safe_load(searched.config.read_text())
    changed.write_text(yaml.safe_dump({**config, "prompt_search": {**config["prompt_search"], "start": BETTER}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFLECTION_KEY", KEY)
        lines = searched.rft("prompt", "optimise", "--config", str(changed)).stdout.splitlines()
    assert lines[0].startswith("no better prompt was found (start ") and ", 4 rounds give " in lines[0]
    assert "gate    not better: no prompt was better than the starting one on the tasks of the search" in lines
    assert any(line.startswith("prompt  the starting one; nothing was registered, from ") for line in lines)
    assert lines[-1] == BETTER
    assert "## The starting prompt" in (searched.home / "prompts" / "report.md").read_text()
    name = searched.search["address"].removeprefix("prompts:/").partition("/")[0]
    versions = open_client(f"sqlite:///{searched.home}/mlflow/mlflow.db").search_prompt_versions(name)
    assert [str(version.version) for version in versions] == ["1"]
    with open_instance(Home(searched.home)) as instance:
        record = instance.fetch_materializations(dg.AssetKey("optimised_prompt"), limit=1).records[0]
    assert record.asset_materialization is not None
    shown = record.asset_materialization.metadata
    assert shown["registered_as"].value == "nothing: no better prompt was found" and shown["better"].value is False


def test_a_started_project_without_the_section_is_refused(searched: Any, tmp_path: Path) -> None:
    changed = tmp_path / "rft.yaml"
    config = yaml.safe_load(searched.config.read_text())
    changed.write_text(yaml.safe_dump({**config, "prompt_search": None}))
    done = searched.rft("prompt", "optimise", "--config", str(changed), check=False)
    assert done.returncode == 2 and "no prompt_search in the configuration" in done.stderr
