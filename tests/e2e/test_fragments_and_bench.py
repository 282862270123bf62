"""Printed YAML run as it is, completed with model and tasks; an auxiliary model beside it; every policy measured."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.config.home import Home
from rft_platform.experience.store import ExperienceStore
from rft_platform.rounds.project.record import Explored, Policy, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PRINTED = Path(__file__).resolve().parents[1] / "config" / "data"


def merged(printed: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """``printed`` with what it leaves open; nothing that it says is changed."""
    both = dict(own)
    for key, value in printed.items():
        both[key] = merged(value, own.get(key) or {}) if isinstance(value, dict) else value
    return both


def completed(make_project: Any, name: str, rounds: int, **more: Any) -> Any:
    """A project of a printed file: the tiny model, additions, and the calculator as its agent."""
    project = make_project(name.removesuffix(".yaml"))
    own = yaml.safe_load(project.config.read_text())
    own["model"] |= {"max_model_len": 512, "max_response_tokens": 8}  # the tools stand in every prompt
    del own["algorithm"]["algorithm_type"], own["buffer"]["train_batch_size"]
    own["buffer"] |= {"batch_size": 3, "total_steps": rounds}
    tasksets = [own["buffer"]["explorer_input"]["taskset"], *own["buffer"]["explorer_input"]["eval_tasksets"]]
    for taskset in tasksets:
        taskset |= {"workflow": "calculator", "format": {"prompt_key": "question", "response_key": "answer"}}
    own = merged(more, own)
    for taskset in tasksets if "explorer" in more else []:
        taskset["judge"] = "judge_with_model:heard_by_critic"
    printed = yaml.safe_load((PRINTED / name).read_text(encoding="utf-8"))
    project.config.write_text(yaml.safe_dump(merged(printed, own)))
    return project


def rounds_of(project: Any) -> ExperienceStore:
    return ExperienceStore(project.home / "rounds")


def runs_of(project: Any, job: str) -> list[str]:
    """Partitions of the runs of a job, oldest first."""
    from rft_platform.jobs.instance import open_instance

    with open_instance(Home(project.home)) as instance:
        return [run.tags["dagster/partition"] for run in reversed(instance.get_runs()) if run.job_name == job]


def test_the_printed_agent_file_runs_with_a_critic_and_every_policy_is_measured(
    make_project: Any, tiny_model: Path
) -> None:
    critic = {"name": "critic", "model_path": str(tiny_model), "max_model_len": 128}
    seldom = {"every": 100, "greedy": False, "sampled_n": 2}
    project = completed(make_project, "react_agent.yaml", 3, explorer={"auxiliary_models": [critic]}, evaluation=seldom)
    project.rft("run", "--config", str(project.config), "--detach-engines")
    assert list(Home(project.home).cluster.leases()) == ["auxiliary-critic", "engine", "trainer"]
    rows = [row for number in (1, 2, 3) for row in rounds_of(project).rollout_rows(number)]
    assert {row.tools[0]["function"]["name"] for row in rows} == {"calculator"}
    assert {row.messages[-1]["role"] for row in rows} <= {"user", "tool"}  # no call of the critic's
    trained = [n for n in (1, 2, 3) if read(rounds_of(project), n).has(Policy)]
    assert project.note(trained[0], "policy")["policy_version"] > 0

    measured = [n for n in trained if project.note(n, "evaluation")["results"]]
    assert measured == [trained[-1]]  # the last always is
    table = project.json("eval", "--all")["policies"]
    assert runs_of(project, "evaluate_job") == [f"r{n:04d}" for n in trained[:-1]]
    assert [line["round"] for line in table] == [0, *trained]
    assert all(line["metrics"] and not line["left_out"] for line in table)
    names = set(table[-1]["metrics"][0])
    assert {f"eval/held-out/{name}" for name in ("reward/mean@2", "pass/std@2", "reward/best@2")} <= names
    assert "vs start" not in table[0]["comparisons"]
    assert {each["against"] for each in table[-1]["comparisons"]} >= {"previous", "start"}
    assert "from the start" in (project.home / "bench.md").read_text()
    before = runs_of(project, "evaluate_job")
    project.rft("run", "--config", str(bench_file(project)))  # nothing is left to measure
    assert runs_of(project, "evaluate_job") == before
    assert "auxiliary-critic" in " ".join(path.stem for path in (project.home / "logs").glob("*.log"))
    stopped = project.rft("stop").stdout
    assert stopped.count("stopped") == 3
    assert not Home(project.home).cluster.leases()


def bench_file(project: Any) -> Path:
    """The same project in mode bench."""
    config = yaml.safe_load(project.config.read_text())
    path: Path = project.config.with_name("bench.yaml")
    path.write_text(yaml.safe_dump({**config, "mode": "bench"}))
    return path


def test_the_other_printed_agent_file_runs_and_a_fresh_bench_measures_the_base_model(make_project: Any) -> None:
    project = completed(make_project, "react_agent_zh.yaml", 2)
    done = project.rft("run", "--config", str(bench_file(project)), "--detach-engines")
    assert "round 0 (v0)" in done.stdout
    assert not read(rounds_of(project), 1).has(Explored)
    project.rft("run", "--config", str(project.config), "--detach-engines")
    assert any(read(rounds_of(project), n).has(Policy) for n in (1, 2))
    said = project.rft("eval", "--round", "0").stdout
    assert "previous" not in said  # there is nothing before the start
