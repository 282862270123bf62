"""An interrupted drive leaves nothing behind in its process that ends the launches of a later drive."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import pytest
import yaml

from rft_platform import project_definitions
from rft_platform.assets.run_failure import FAULT_TAG, reports_faults
from rft_platform.common.errors import TrainerError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, write, write_snapshot
from rft_platform.run import driver
from rft_platform.run.console import notes
from rft_platform.run.driver import drive
from rft_platform.run.run_cost import drive_costs
from rft_platform.run.start import drive_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@dataclass
class Stages:
    """Jobs of a project whose rounds overlap. The first training does not end before ``release`` is set."""

    project: Project
    interrupts: bool = True  # whether the exploration beside the first training receives Ctrl-C
    training: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def definitions(self) -> dg.Definitions:
        @dg.asset(partitions_def=PLAIN_NAMES.rounds)
        @reports_faults
        def exploration(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
            number = int(context.partition_key[1:])
            if number == 2 and self.interrupts:
                assert self.training.wait(60)
                self.interrupts = False
                os.kill(os.getpid(), signal.SIGINT)
                self.release.wait(60)  # the signal ends this wait
            write_snapshot(self.project.store, number, Policy("f", 0, "w", 0))
            write(self.project.store, number, Judged(sound=True))
            return dg.MaterializeResult()

        @dg.asset(partitions_def=PLAIN_NAMES.rounds)
        @reports_faults
        def training(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
            number = int(context.partition_key[1:])
            outlives = self.interrupts
            self.training.set()
            if outlives:
                assert self.release.wait(60)
                raise TrainerError("the trainer cancelled the training")
            publish(self.project.store, Policy("weights", number, f"d{number}", number))
            write(self.project.store, number, RoundEvaluation())
            return dg.MaterializeResult()

        jobs = [
            dg.define_asset_job("explore_job", [exploration]),
            dg.define_asset_job("sync_round_job", [training]),
        ]
        return dg.Definitions(assets=[exploration, training], jobs=jobs)


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    """A project of two rounds that overlap, after its start."""
    home, tasks = Home(tmp_path / "home"), tmp_path / "tasks.jsonl"
    monkeypatch.setenv("RFT_HOME", str(home.root))
    monkeypatch.setattr(driver, "_INTERRUPTED_S", 1.0)
    tasks.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n')
    config = {
        "model": {"model_path": "unused"},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": {"path": str(tasks)}}},
        "synchronizer": {"sync_offset": 1},
    }
    write_text(home.config_file, yaml.safe_dump(config))
    stages = Stages(Project.open(home))
    publish(stages.project.store, Policy("base", 0, "d0", 0))
    write(stages.project.store, 0, RoundEvaluation())
    yield stages
    stages.release.set()


@pytest.mark.parametrize("limit", [None, 10], ids=["two threads", "one thread"])
def test_a_drive_after_an_interrupted_one_whose_training_still_runs(stages: Stages, limit: int | None) -> None:
    with pytest.raises((KeyboardInterrupt, dg.DagsterExecutionInterruptedError)):
        drive(stages.project, stages.definitions)
    left = next(thread for thread in threading.enumerate() if thread.name == "trainings")
    again = drive(stages.project, stages.definitions, limit)
    assert (again.finished, again.failed, again.error) == (True, None, None)
    stages.release.set()
    left.join(60)
    with open_instance(stages.project.home) as instance:
        runs = instance.get_runs()
    assert not [run.tags[FAULT_TAG] for run in runs if FAULT_TAG in run.tags], "the interrupted training is no failure"


def test_the_ledger_has_the_launches_that_ended_before_the_interruption(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_definitions, "stored_definitions", lambda _home: stages.definitions)
    with pytest.raises(KeyboardInterrupt):
        drive_project(stages.project, notes())
    (cost,) = drive_costs(stages.project.home)
    assert ("explore", 1) in [(launch["kind"], launch["round"]) for launch in cost.launches]
