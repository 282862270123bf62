"""Both dynamic styles with a real engine and trainer: what trained when, on which rows, and what is traced of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.experience.queries import connect, rows_that_trained
from rft_platform.experience.selections import TRAINED_ON, read_selection
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import RoundRecord, RowSelection, read, required
from rft_platform.rounds.reporting.lineage import trace_checkpoint, trace_row
from rft_platform.rounds.setup.connections import connect_registry

pytestmark = pytest.mark.slow


#: The keys that the projects differ in; three explore batches of 8 tasks x 4 runs each.
STYLES = {
    "by_explorer": {"sync_style": "dynamic_by_explorer", "sync_interval": 2, "train_batch_size": 48},
    "by_trainer": {"sync_style": "dynamic_by_trainer", "sync_interval": 2, "train_batch_size": 24},
}

#: Drives one project after the other in one process, which starts one engine and one trainer for all.
DRIVE = """
import importlib, json, os, sys
os.environ["RFT_HOME"] = sys.argv[1]
from rft_platform import definitions
from rft_platform.config.home import Home
from rft_platform.run.driver import drive
from rft_platform.rounds.project.project import Project
for root in sys.argv[1:]:
    os.environ["RFT_HOME"] = root
    defs = importlib.reload(definitions).defs  # they belong to the home that they were made for
    done = drive(Project.open(Home.from_environment()), defs)
    assert done.finished, done.failed or done.error
    print(json.dumps([f"{each.kind} {each.round}" for each in done.launched]))
"""


@pytest.fixture(scope="module")
def finished_styles(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    make_config: Callable[..., Any],
    with_mlflow: Callable[[Path], None],
) -> dict[str, tuple[Project, list[str]]]:
    """A finished project of each style, and what its driver launched."""
    homes = {}
    for name, style in STYLES.items():
        folder = tmp_path_factory.mktemp(name)
        keys = {key: value for key, value in style.items() if key != "train_batch_size"}
        config = make_config(folder, tiny_model, synchronizer=keys, explorer={"eval_on_startup": False})
        config["buffer"].update(train_batch_size=style["train_batch_size"], total_steps=3)
        homes[name] = Home(folder / "home")
        write_text(homes[name].config_file, yaml.safe_dump(config))
        with_mlflow(homes[name].root)
    first, *others = homes.values()
    first.leases.mkdir(parents=True)
    for home in others:
        home.leases.symlink_to(first.leases)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRIVE, *(str(home.root) for home in homes.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    stop = {**environment, "RFT_HOME": str(first.root)}
    subprocess.run([sys.executable, "-m", "rft_platform", "stop"], env=stop, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    launched = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {name: (Project.open(home), jobs) for (name, home), jobs in zip(homes.items(), launched, strict=True)}


def selected(project: Project, number: int) -> set[str]:
    """Row ids that a training was given."""
    return {row["row_id"] for row in read_selection(project.store, number).to_pylist() if row["use"] in TRAINED_ON}


def check_traces(project: Project, number: int) -> None:
    """From the weights to the very rows, and back."""
    with connect(project.store, project.checkpoints) as connection:
        found = {row["row_id"] for row in rows_that_trained(connection, number)}
    assert found == selected(project, number)
    folder = required(project.store, number).folder
    newest = trace_checkpoint(folder, project.store, verify=True).trainings[0]
    assert newest.rows_trained == len(found) and newest.data_unchanged
    row = trace_row(min(found), project.store, project.checkpoints)
    assert str(folder) in [checkpoint.checkpoint for checkpoint in row.trained]


def records_of(project: Project) -> list[RoundRecord]:
    """The records of the three rounds."""
    return [read(project.store, number) for number in (1, 2, 3)]


def settled(project: Project) -> list[RowSelection]:
    """The selections of both trainings."""
    found = [record.selection() for record in records_of(project)[:2]]
    return [selection for selection in found if selection is not None]


def explored_with(project: Project) -> list[int]:
    """The policy version that each exploration used."""
    return [record.explored.policy_version for record in records_of(project) if record.explored is not None]


def staleness_of_the_last(project: Project) -> float:
    """The largest staleness of a row in the first step of the last training."""
    trained = read(project.store, 2).trained()
    assert trained is not None
    return trained.step_events[0].metrics["staleness_max"]


def status_in_mlflow(project: Project) -> str:
    """The status of the training's MLflow run."""
    run = connect_registry(project).training_run(project.config.name)
    return str(run.client.get_run(run.run_id).info.status)


def test_by_explorer_trains_what_landed_and_every_row_is_traced(finished_styles: dict[str, Any]) -> None:
    project, launched = finished_styles["by_explorer"]
    assert launched == ["warm_start 0", "explore 1", "explore 2", "sync 1", "explore 3", "sync 2"]
    assert [one.fresh_rounds for one in settled(project)] == [[1, 2], [3]]
    first = required(project.store, 1).policy_version
    assert first == 2, "64 experiences in two steps, as equal as can be"
    assert explored_with(project) == [0, 0, first]
    assert not selected(project, 1) & selected(project, 2)
    assert staleness_of_the_last(project) == 0
    evaluated = read(project.store, 2).evaluated
    assert evaluated is not None and evaluated.results, "the last training is evaluated"
    assert status_in_mlflow(project) == "FINISHED", "though there were fewer trainings than batches"
    for number in (1, 2):
        check_traces(project, number)


def test_by_trainer_makes_its_steps_and_leaves_the_rest_for_the_next(finished_styles: dict[str, Any]) -> None:
    project, launched = finished_styles["by_trainer"]
    assert launched == ["warm_start 0", "explore 1", "explore 2", "sync 1", "explore 3", "sync 2"]
    first, second = settled(project)
    assert [first.rows["fresh"], second.rows["fresh"]] == [48, 48] and first.left == {2: 16}
    assert explored_with(project) == [0, 0, 2]
    assert staleness_of_the_last(project) == 2, "what was left of batch 2 is two versions old"
    assert required(project.store, 2).policy_version == 4
    for number in (1, 2):
        check_traces(project, number)
