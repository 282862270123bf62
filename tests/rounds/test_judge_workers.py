"""Judges in worker processes: which projects have them, and the judgements of this process; on Ray: ``ray_cluster``."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rft_platform.cluster.interface import Bundle
from rft_platform.cluster.local.local_cluster import LocalCluster
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel, AuxiliarySpec
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.setup.judge_workers import ClusterJudgeWorkers, judge_workers_of
from tests.judging.conftest import TASKS, run_rows
from tests.ray_cluster import judges


@pytest.mark.parametrize(
    ("cluster", "workers", "judge_there"),
    [
        ("ray", {"kind": "process", "cpus": 2, "count": 3}, True),
        ("ray", {"kind": "process", "judges": False}, False),
        ("ray", {"kind": "inprocess"}, False),
        ("local", {"kind": "process"}, False),
    ],
)
def test_judges_run_in_workers_of_a_ray_cluster(
    tmp_path: Path, cluster: str, workers: dict[str, object], judge_there: bool
) -> None:
    file = tmp_path / "project.yaml"
    file.write_text(yaml.safe_dump({"cluster": {"kind": cluster}, "explorer": {"workers": workers}}))
    found = judge_workers_of(Project(Home(tmp_path / "home"), load_config(file)))
    assert (found is not None) == judge_there
    if found is not None:
        assert (found.bundle, found.count) == (Bundle(2), 3)


async def test_workers_get_the_auxiliary_models_of_judges_that_ask_them(tmp_path: Path) -> None:
    workers = ClusterJudgeWorkers(LocalCluster(tmp_path / "leases", tmp_path / "logs"), 1, log_folder=tmp_path)
    model = AuxiliaryModel(AuxiliarySpec("helper", "m", "http://127.0.0.1:1/v1"))
    async with workers.calling(build_judge(f"{judges.__name__}:asks"), {"helper": model}, 1) as calls:
        assert calls is not None  # each worker gets the models when it starts


@pytest.mark.slow
def test_judgements_of_workers_are_those_of_this_process(tmp_path: Path) -> None:
    """A failure, a time-out, and a worker that dies: in the second case it is replaced, in the third asked again."""
    workers = ClusterJudgeWorkers(LocalCluster(tmp_path / "leases", tmp_path / "logs"), 2, log_folder=tmp_path)
    for name, answers in (("length", ["a", "raise", "ccc"]), ("sleeps", ["0", "30", "0"])):
        judge = replace(build_judge(f"{judges.__name__}:{name}"), timeout_s=1.0)
        here = judge_runs(run_rows(answers), TASKS, judge)
        there = judge_runs(run_rows(answers), TASKS, replace(judge, workers=workers))
        assert [(run.parts, run.error, run.rewards) for run in there] == [
            (run.parts, run.error, run.rewards) for run in here
        ]
        assert [run.error is None for run in there] == [True, False, True]
    answers = ["a", "kill", "bb"]
    judge = build_judge(f"{judges.__name__}:counted", {"folder": str(tmp_path), "victim": "worker"})
    runs = judge_runs(run_rows(answers), TASKS, replace(judge, workers=workers))
    assert [run.reward for run in runs] == [1.0, 4.0, 2.0]
    assert Counter(file.name.partition(".")[0] for file in tmp_path.glob("*.ended")) == Counter(answers)
