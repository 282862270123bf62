"""Odd values of single runs in a whole project: its rounds are trained, and the values are in MLflow."""

from typing import Any

import pytest
import yaml

from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.connections import connect_registry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def odd(make_project: Any) -> Any:
    """A project of one round, whose agent is ``odd_agent``."""
    project = make_project("odd", explorer={"max_retry_times": 0, "group_policy": "drop"})
    config = yaml.safe_load(project.config.read_text())
    config["buffer"]["total_steps"] = 1
    for taskset in (inputs := config["buffer"]["explorer_input"])["taskset"], *inputs["eval_tasksets"]:
        taskset["workflow"] = "odd_agent:answer"
    project.config.write_text(yaml.safe_dump(config))
    project.rft("run", "--config", str(project.config))
    return project


def test_a_run_that_raises_no_exception_fails_alone(odd: Any) -> None:
    report = odd.note(1, "explore")
    assert report["errors"] == {"GeneratorExit: ": 4}, report
    rows = ExperienceStore(odd.home / "rounds").rollout_rows(1)
    assert len({row.task_id for row in rows}) == 7


def test_a_metric_whose_name_mlflow_refuses_is_in_mlflow_under_another_one(odd: Any) -> None:
    assert odd.note(1, "judge")["workflow_metrics"] == {"../../x/..": 2.0, "tool//errors": 1.0}
    project = Project.open(Home(odd.home))
    run = connect_registry(project).training_run(project.config.name)
    logged = run.client.get_run(run.run_id).data.metrics
    names = [name.rpartition("-")[0] for name in sorted(logged) if "tool" in name or "/x" in name]
    assert [name for name in names if name.startswith("round/")] == [
        "round/workflow_metrics/tool/errors", "round/workflow_metrics/x",
    ]  # fmt: skip
    assert any(name.startswith("eval/held-out/tool/errors/mean") for name in names)
