"""Two policies that play each other on real engines: each trained on its own rows, whatever dies in between."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.cli.commands.trace import find_trace
from rft_platform.common.files import write_text
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.home import Home
from rft_platform.experience.queries import task_outcomes
from rft_platform.experience.selections import TRAINED_ON, read_selection
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import published, read, required
from rft_platform.rounds.reporting.lineage import CheckpointTrace, RowTrace
from rft_platform.run.round_lines import round_lines

pytestmark = pytest.mark.slow
NAMES = (DEFAULT_POLICY, "rival")

#: Drives the project; between the two trainings of round 2 the trainer is killed. Then trains both of that round anew,
#: from the same parents, and prints the digests of the weights that this leads to.
DRIVE = """
import json, os, signal, sys, tempfile
from dataclasses import replace
from rft_platform import definitions
from rft_platform.config.home import Home
from rft_platform.run.driver import drive
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.cluster.local.leases import read_lease
from rft_platform.rounds import train as rounds_train
from rft_platform.rounds.project.record import parent_of
from rft_platform.rounds.setup.connections import connect_trainer
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.selection.row_selection import select_rows
project = Project.open(Home.from_environment())
train, killed = rounds_train.train, []
def kills(project, trainer, round_number, dagster_run_id, policy):
    if policy == DEFAULT_POLICY and round_number == 2 and not killed:  # the first policy, which trains last
        killed.append(read_lease(project.home.leases / "trainer.json").pid)
        os.kill(killed[0], signal.SIGKILL)
    return train(project, trainer, round_number, dagster_run_id, policy)
rounds_train.train = kills
done = drive(project, definitions.defs)
assert done.finished, done.failed or done.error
again = {}
with tempfile.TemporaryDirectory() as folder:
    for name in (DEFAULT_POLICY, "rival"):
        parent = parent_of(project.store, 2, name)
        request = rounds_train.train_request(project, parent, 2, select_rows(project, 2, parent), "")
        result = connect_trainer(project).train(replace(request, output=f"{folder}/{name}"))
        again[name] = result.weights_digest
trainer = read_lease(project.home.leases / "trainer.json").pid
print(json.dumps({"killed": killed, "trainer": trainer, "again": again}))
"""


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    make_config: Callable[..., Any],
    with_mlflow: Callable[[Path], None],
) -> tuple[Project, dict[str, Any]]:
    """A finished project of two rounds, and what its driver said."""
    folder = tmp_path_factory.mktemp("players")
    config = make_config(folder, tiny_model, policies=[{"name": "rival", "model_path": str(tiny_model)}])
    config["explorer"] = {"eval_on_startup": False}
    config["evaluation"] = {"every": 2, "sampled_n": 1, "greedy": False}
    config["buffer"].update(batch_size=4, train_batch_size=16, total_steps=2)
    for taskset in (
        config["buffer"]["explorer_input"]["taskset"],
        *config["buffer"]["explorer_input"]["eval_tasksets"],
    ):
        taskset.update(workflow="two_players:play", judge=None)
    home = Home(folder / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    with_mlflow(home.root)
    environment = {**os.environ, "RFT_HOME": str(home.root), "PYTHONPATH": str(Path(__file__).parent)}
    environment |= {"OMP_NUM_THREADS": "1", "RFT_RETRY_DELAY_S": "0.1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVE], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    subprocess.run([sys.executable, "-m", "rft_platform", "stop"], env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return Project.open(home), json.loads(done.stdout.splitlines()[-1])


def trained_on(project: Project, number: int, name: str) -> set[str]:
    rows = read_selection(project.store, number, policy=name).to_pylist()
    return {row["row_id"] for row in rows if row["use"] in TRAINED_ON}


def test_each_policy_is_trained_on_the_calls_that_named_it(played: tuple[Project, dict[str, Any]]) -> None:
    project, _ = played
    for number in (1, 2):
        rows = project.store.rollout_rows(number)
        by_policy = {name: {row.row_id for row in rows if row.policy == name} for name in NAMES}
        assert [len(ids) for ids in by_policy.values()] == [16, 32]
        judged = {row.row_id: row for row in project.store.judged_rows(number)}
        for row in rows:
            sign = 1 if row.policy == DEFAULT_POLICY else -1
            assert judged[row.row_id].reward == pytest.approx(sign * last_reward(rows, row.run_id))
        for name, ids in by_policy.items():
            assert trained_on(project, number, name) == ids
            before, after = required(project.store, number - 1, name), required(project.store, number, name)
            assert after.weights_digest != before.weights_digest and after.policy_version > before.policy_version
            sampled_by = {row.policy_version for row in rows if row.policy == name}
            assert sampled_by == {before.policy_version}
            assert Path(after.folder).parent == project.checkpoints_of(name)
            assert after.canary is not None and after.model_version == str(number)


def last_reward(rows: list[Any], run_id: str) -> float:
    return next(row.run_reward for row in rows if row.run_id == run_id and row.run_reward is not None)


def test_a_trainer_killed_between_the_two_changes_nothing(played: tuple[Project, dict[str, Any]]) -> None:
    project, said = played
    assert said["killed"] and said["trainer"] not in said["killed"], "another trainer went on"
    for name in NAMES:
        assert said["again"][name] == required(project.store, 2, name).weights_digest


def test_weights_and_rows_are_traced_by_policy(played: tuple[Project, dict[str, Any]]) -> None:
    project, _ = played
    for target, name in (("r0002", DEFAULT_POLICY), ("r0002/rival", "rival")):
        found = find_trace(project, target, verify=True)
        assert isinstance(found, CheckpointTrace) and found.complete and len(found.trainings) == 2
        for training, number in zip(found.trainings, (2, 1), strict=True):
            assert training.rows_trained == len(trained_on(project, number, name)) and training.data_unchanged
            assert training.more.get("policy") == name and training.result.model_version == number
    row = find_trace(project, min(trained_on(project, 1, "rival")))
    assert isinstance(row, RowTrace) and row.policy == "rival"
    policy = published(project.store, 1, "rival")
    assert policy is not None and [one.checkpoint for one in row.trained] == [policy.folder]


def test_rounds_name_every_version(played: tuple[Project, dict[str, Any]]) -> None:
    project, _ = played
    versions = [required(project.store, number, "rival").policy_version for number in range(3)]
    assert [line.policies["rival"] for line in round_lines(project)] == versions
    explored = read(project.store, 2).explored
    assert explored is not None and explored.figures["policy_version/rival"] == versions[1]
    judged = read(project.store, 2).judged
    assert judged is not None and judged.figures["mean_reward/rival"] == pytest.approx(-judged.mean_reward)
    won: dict[str, float] = {}
    for row in project.store.rollout_rows(2):
        if row.run_reward is not None:
            won[row.task_id] = won.get(row.task_id, 0.0) + float(row.run_reward >= 0.0)
    assert {task: passes for task, _, _, passes in task_outcomes(project.store, [2], 0.0)} == won, (
        "as the first sees it"
    )
    evaluated = read(project.store, 2).evaluated
    assert evaluated is not None and evaluated.results, "both played the held-out tasks"
