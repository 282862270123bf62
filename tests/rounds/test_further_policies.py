"""Notes, snapshots, repair_on_failure and thinning of policies beside the first."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rft_platform.common.digests import MANIFEST
from rft_platform.common.errors import DamageRepairedError
from rft_platform.common.files import write_sealed_json, write_text
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.home import Home
from rft_platform.model_registry.models import PREVIOUS_TAG, RegisteredModel
from rft_platform.rounds.explore import snapshot_for
from rft_platform.rounds.maintenance.checkpoint_retention import thin_checkpoints
from rft_platform.rounds.project.policy import explored_with, is_published
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Policy,
    RoundEvaluation,
    Trained,
    publish,
    published,
    read,
    withdraw,
    write,
)
from rft_platform.rounds.project.repair import repair_checkpoint
from rft_platform.rounds.reporting.bench import bench_lines, unmeasured
from rft_platform.rounds.round import Round
from tests.support.builders import write_rows
from tests.support.records import trained

NAMES = (DEFAULT_POLICY, "rival", "guard")


class Registry:
    """What thinning asks of a registry."""

    def __init__(self, *versions: RegisteredModel) -> None:
        self._versions = list(versions)

    def champion(self) -> RegisteredModel | None:
        """The last one."""
        return self._versions[-1] if self._versions else None

    def versions(self) -> list[RegisteredModel]:
        """All of them."""
        return self._versions


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Three policies after two rounds; ``guard`` is not trained."""
    home = Home(tmp_path / "home")
    policies = [{"name": "rival", "model_path": "b"}, {"name": "guard", "model_path": "c", "train": False}]
    settings: dict[str, Any] = {"model": {"model_path": "a"}, "trainer": {"max_checkpoints_to_keep": 1}}
    settings |= {
        "buffer": {"eval_tasksets": [{"path": write_rows(tmp_path / "t.jsonl", [{"question": "1", "answer": "1"}])}]}
    }
    settings |= {"project": "p", "name": "n", "policies": policies, "synchronizer": {"sync_offset": 1}}
    write_text(home.config_file, yaml.safe_dump(settings))
    opened = Project.open(home)
    for number in range(3):
        for name in NAMES:
            make(opened, name, number)
    return opened


def make(project: Project, name: str, number: int) -> None:
    """Publish a checkpoint of a policy."""
    folder = project.checkpoints_of(name) / f"global_step_{number}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w")
    write_sealed_json(folder / MANIFEST, {"files": {}})
    publish(project.store, Policy(str(folder), number, f"{name}{number}", round=number, name=name))


def test_each_policy_is_found_under_its_name(project: Project) -> None:
    for name in NAMES:
        found = published(project.store, 2, name)
        assert found is not None and found.weights_digest == f"{name}2" and is_published(project.store, found)
    assert read(project.store, 2).has(Policy, "rival") and published(project.store, 2, "other") is None


def test_a_round_keeps_the_versions_that_it_settled_on(project: Project) -> None:
    first = snapshot_for(project, 3)
    assert (first.name, first.policy_version) == (DEFAULT_POLICY, 2)
    found = {name: (one.name, one.policy_version) for name, one in explored_with(project, 3).items()}
    assert found == {name: (name, 2) for name in NAMES}
    withdraw(project.store, 2, Policy, "rival")  # its checkpoint is gone: the offset permits the round before
    snapshot_for(project, 3)
    found = {name: one.policy_version for name, one in explored_with(project, 3).items()}
    assert found == {DEFAULT_POLICY: 2, "rival": 1, "guard": 2}


def test_a_policy_that_is_not_trained_stays_as_it_is(project: Project) -> None:
    made = Round(project, 3).train_policy("guard", None, None)  # type: ignore[arg-type]
    assert (made.selection, made.trained) == (None, None) and made.policy == published(project.store, 3, "guard")
    kept = published(project.store, 3, "guard")
    assert kept is not None
    assert (kept.round, kept.policy_version, kept.weights_digest) == (3, 2, "guard2")


def test_a_damaged_checkpoint_withdraws_the_notes_of_its_policy_alone(project: Project) -> None:
    store, damaged = project.store, published(project.store, 2, "rival")
    for name in (DEFAULT_POLICY, "rival"):
        write(store, 2, trained(), name)
    write(store, 2, RoundEvaluation())
    assert damaged is not None
    (Path(damaged.folder) / MANIFEST).unlink()
    with pytest.raises(DamageRepairedError, match=r"rival/global_step_2 is damaged.*set aside"):
        repair_checkpoint(project, damaged)
    record = read(store, 2)
    assert [record.has(Policy, name) and record.has(Trained, name) for name in NAMES[:2]] == [True, False]
    assert not record.has(Trained, "rival") and not record.has(RoundEvaluation), "the round is synced again"
    assert not Path(damaged.folder).exists() and published(store, 1, "rival") is not None


def test_each_policys_old_weights_are_removed(project: Project) -> None:
    removed = thin_checkpoints(project, Registry())  # type: ignore[arg-type]
    assert removed == [project.checkpoints_of(name) / "global_step_1" for name in NAMES]
    for name in NAMES:
        assert _whole(project, name, 3) == [0, 2], "the start and the newest stay"


def test_the_policies_that_play_with_the_champion_and_the_one_before_it_stay(project: Project) -> None:
    for number in (3, 4, 5):
        for name in NAMES:
            make(project, name, number)
    first = project.checkpoints_of(DEFAULT_POLICY)
    before, champion = (RegisteredModel("m", n, first / f"global_step_{n}", tags={PREVIOUS_TAG: "1"}) for n in (1, 3))
    thin_checkpoints(project, Registry(before, champion))  # type: ignore[arg-type]
    assert [_whole(project, name, 6) for name in NAMES] == [[0, 1, 3, 5]] * 3


def test_a_round_of_which_a_policy_lost_its_weights_is_not_measured(project: Project) -> None:
    assert unmeasured(project) == [0, 1, 2]
    (project.checkpoints_of("rival") / "global_step_1/model.safetensors").unlink()
    assert unmeasured(project) == [0, 2]
    assert [line.left_out for line in bench_lines(project)][:2] == ["not measured yet", "its weights were removed"]


def _whole(project: Project, name: str, rounds: int) -> list[int]:
    folder = project.checkpoints_of(name)
    return [n for n in range(rounds) if (folder / f"global_step_{n}/model.safetensors").exists()]
