"""The record of a round: every part comes back as it was written, and what is not a part is named."""

from dataclasses import replace
from pathlib import Path

import pytest

from rft_platform.common.errors import DamagedError, StorageError
from rft_platform.common.files import write_sealed_json
from rft_platform.evaluation.comparison import Comparison
from rft_platform.evaluation.metrics import PassRate
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.canary import Canary
from rft_platform.judging.execution.experience_pipeline import OperatorReport
from rft_platform.rounds.project.record import (
    DatasetFile,
    Demonstrations,
    Explored,
    Judged,
    Policy,
    RoundEvaluation,
    RowSelection,
    Start,
    Taken,
    TaskBatches,
    all_figures,
    move_folders,
    read,
    withdraw,
    write,
    write_snapshot,
)
from rft_platform.training.protocol import StepEvent
from tests.support.records import result, trained

OPERATOR = OperatorReport("std_filter", 4, 2, 4, 2, 2, 1, {"threshold": 0.5})
COMPARISON = Comparison("start", "sampled_pass", 0, 0, 0.25, 0.125, 0.5, 8)


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    return ExperienceStore(tmp_path / "rounds")


def test_every_part_of_a_record_round_trips(store: ExperienceStore) -> None:
    home = store.home
    start = Start(1, 8, [16, 24], "the gate refused version 24", fresh_optimizer=True)
    explored = Explored(rows=4, task_selection=TaskBatches("random", tasks=[["a"]]), figures={"errors": {"x": 1}})
    judged = Judged("exact@1", sound=True, operators=[OPERATOR], judge_codes={"exact@1": None}, figures={"runs": 4})
    selection = RowSelection(sha256="sha", rows={"fresh": 4}, judge_versions={3: "exact@1"}, left={4: 2})
    training = trained(checkpoint=str(home / "c"), steps=1, step_events=[StepEvent(1, {"loss": 0.5})])
    policy = Policy(str(home / "c"), 8, "digest", round=3, canary=Canary([[1]], [[0.0]]), model_version="2")
    measured = result(sampled=PassRate(0.5, 0.25, 0.75, 8, 16), scores={"sampled": {"task": [1.0, 0.0]}})
    evaluated = RoundEvaluation("better", promoted=True, results=[measured], compared=[COMPARISON])
    dataset = DatasetFile(str(home / "d.parquet"), 1, 2, "sha", "digest", "here", {"here": "sha"}, {"rows": 1})
    others = (Demonstrations(0, None), Taken(7))
    for part in (start, explored, judged, selection, training, policy, evaluated, dataset, *others):
        write(store, 3, part)
    found = read(store, 3)
    assert (found.start, found.explored, found.judged, found.evaluated) == (start, explored, judged, evaluated)
    assert (found.selection(), found.trained(), found.published()) == (selection, training, policy)
    assert (found.dataset, found.demonstrations, found.taken) == (dataset, *others)
    assert read(store, 2).judged is None and not read(store, 2).has(Judged)


def test_a_moved_home_finds_its_checkpoints(store: ExperienceStore, tmp_path: Path) -> None:
    write(store, 1, Policy(str(tmp_path / "checkpoints/c"), 8, "digest", round=1))
    write_snapshot(store, 1, Policy("/base", 0, "base", round=0))
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    there = ExperienceStore(moved / "rounds")
    move_folders(there, {"/base": "/elsewhere"})
    published, snapshot = read(there, 1).published(), read(there, 1).snapshot()
    assert published is not None and published.folder == str(moved / "checkpoints/c")
    assert snapshot is not None and snapshot.folder == "/elsewhere"


def test_each_policy_has_its_own_parts(store: ExperienceStore) -> None:
    rival = Policy("/f", 8, "digest", round=1, name="rival")
    write(store, 1, rival, "rival")
    write_snapshot(store, 1, replace(rival, round=0))
    assert read(store, 1).published("rival") == rival and read(store, 1).published() is None
    assert read(store, 1).has_snapshot("rival") and not read(store, 1).has_snapshot()
    withdraw(store, 1, Policy, "rival")
    assert not read(store, 1).has(Policy, "rival") and read(store, 1).has_snapshot("rival")


def test_a_part_is_read_once_and_only_when_it_is_used(store: ExperienceStore) -> None:
    write(store, 1, Judged(sound=True))
    (store.round_folder(1) / "explore.json").write_text("{")
    found = read(store, 1)
    first = found.judged
    write(store, 1, Judged(sound=False))
    assert found.judged is first and read(store, 1).judged == Judged()
    with pytest.raises(StorageError, match=r"explore.json: cannot be read"):
        assert found.explored


def test_the_error_names_a_document_of_another_part(store: ExperienceStore) -> None:
    path = read(store, 1).file(Judged)
    write_sealed_json(path, {"sound": "perhaps"})
    with pytest.raises(StorageError, match=r"judge.json: cannot be read \(sound: .*\): `rft store check --set-aside`"):
        assert read(store, 1).judged
    path.write_text("{}")
    with pytest.raises(DamagedError, match="no digest"):
        assert read(store, 1).judged


def test_figures_for_people_are_one_table(store: ExperienceStore) -> None:
    found = all_figures(
        Judged(
            judge_seconds={"an-earlier-judge": 1.0},
            rows=4,
            mean_reward=0.5,
            figures={"runs": 4, "judge_metrics": {"length": 2.0}},
        )
    )
    assert not {"figures", "judge_seconds"} & found.keys()
    assert (found["rows"], found["mean_reward"], found["runs"]) == (4, 0.5, 4)
    assert found["judge_metrics"] == {"length": 2.0} and "seconds" not in found, "nobody measured it"
