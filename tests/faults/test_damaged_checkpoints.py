"""A checkpoint that is not what was written: named, set aside and made again; or said who rests on it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.common.digests import MANIFEST, checkpoint_damage, digest_once
from rft_platform.common.errors import DamageRepairedError, StorageError, WeightMismatchError
from rft_platform.common.files import digest_file
from rft_platform.model_registry.manifests import all_manifests
from rft_platform.object_store.mirror import open_mirror, removing
from rft_platform.rounds.planning.plan import plan_next
from rft_platform.rounds.planning.project_state import Launches, observe
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, published, write
from rft_platform.rounds.project.repair import repair_checkpoint, repair_on_failure
from tests.support.records import trained as a_training


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[100] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))


def cut_short(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(10)


def lose_a_file(folder: Path) -> None:
    (folder / "trainer_state" / "optimizer.safetensors").unlink()


def lose_the_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def break_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"files": {"model.saf')


DAMAGES = {
    flip_a_byte: "model.safetensors was changed after it was written",
    cut_short: "model.safetensors is 10 bytes long, 4,096 were written",
    lose_a_file: "trainer_state/optimizer.safetensors is missing",
    lose_the_folder: "is missing",
    break_the_manifest: "manifest.json cannot be read",
}


@pytest.fixture
def trained(project: Project, make_checkpoint: Callable[[int], Path]) -> Callable[[int, int], Policy]:
    """Leave what a synced round leaves; a step of 0 is the base model."""
    base = project.home.root.parent / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"base")

    def leave(number: int, step: int) -> Policy:
        known = project.checkpoints / f"global_step_{step}"
        folder = base if not step else known if known.exists() else make_checkpoint(step)
        policy = Policy(str(folder), step, digest_file(folder / "model.safetensors"), number)
        publish(project.store, policy)
        write(project.store, number, a_training())
        write(project.store, number, RoundEvaluation())
        if number:
            write(project.store, number, Judged(sound=True))
        return policy

    return leave


@pytest.mark.parametrize(("harm", "why"), DAMAGES.items(), ids=[harm.__name__ for harm in DAMAGES])
def test_a_damaged_checkpoint_is_quarantined_and_its_round_trained_again(project: Project, trained, harm, why):
    trained(0, 0)
    policy = trained(1, 2)
    repair_checkpoint(project, policy)  # whole: nothing happens
    harm(Path(policy.folder))

    with pytest.raises(DamageRepairedError, match=why) as told:
        repair_checkpoint(project, policy)
    assert policy.folder in str(told.value)
    assert "the training of r0001 is repeated" in str(told.value)
    assert not Path(policy.folder).exists()
    assert published(project.store, 1) is None
    if harm is not lose_the_folder:
        (aside,) = (project.checkpoints / "aside").glob("damaged.global_step_2.??????")
        assert aside.is_dir()
    assert all_manifests(project.checkpoints) == []  # lineage never takes it for a checkpoint
    actions = plan_next(observe(project, Launches())).actions
    assert [(action.kind, action.round) for action in actions] == [("sync", 1)]


def test_rounds_without_a_step_share_the_checkpoint_and_are_repeated_with_it(project: Project, trained):
    trained(0, 0)
    trained(1, 2)
    policy = trained(2, 2)  # a round whose rewards were all equal
    flip_a_byte(Path(policy.folder))
    with pytest.raises(DamageRepairedError, match="the training of r0001 is repeated"):
        repair_checkpoint(project, policy)
    assert published(project.store, 1) is published(project.store, 2) is None


def test_a_checkpoint_that_others_descend_from_is_named_and_left(project: Project, trained):
    trained(0, 0)
    policy = trained(1, 2)
    trained(2, 4)
    flip_a_byte(Path(policy.folder))
    with pytest.raises(StorageError, match=r"the weights of r0002 were trained after it.*restore the folder") as told:
        repair_checkpoint(project, policy)
    assert not told.value.retryable
    assert Path(policy.folder).exists()
    assert published(project.store, 1) == policy


def test_a_base_model_that_changed_is_for_a_person(project: Project, trained):
    policy = trained(0, 0)
    flip = Path(policy.folder) / "model.safetensors"
    flip.write_bytes(b"changed")
    with pytest.raises(StorageError, match="not those that the project was started with") as told:
        repair_checkpoint(project, policy)
    assert not told.value.retryable
    assert flip.exists()


def test_a_checkpoint_of_another_project_is_never_touched(project: Project, make_checkpoint, tmp_path):
    folder = make_checkpoint(2).rename(tmp_path / "global_step_2")  # what the project started from
    policy = Policy(str(folder), 0, digest_file(folder / "model.safetensors"), 0)
    publish(project.store, policy)
    flip_a_byte(folder)
    with pytest.raises(StorageError, match=r"was changed after it was written .*: restore the model"):
        repair_checkpoint(project, policy)
    assert folder.exists()
    assert published(project.store, 0) == policy


def test_a_mismatch_with_undamaged_weights_keeps_its_error(project: Project, trained):
    policy = trained(0, 0)
    with pytest.raises(WeightMismatchError), repair_on_failure(project, policy):
        raise WeightMismatchError("the engine computes something else")


def test_files_that_do_not_change_are_read_once(make_checkpoint, monkeypatch):
    import rft_platform.common.digests as module

    folder, read = make_checkpoint(8), []
    monkeypatch.setattr(module, "digest_file", lambda path: read.append(path.name) or digest_file(path))
    assert checkpoint_damage(folder, digest_once) is checkpoint_damage(folder, digest_once) is None
    assert sorted(read) == ["model.safetensors", "optimizer.safetensors"]
    flip_a_byte(folder)
    assert "was changed after" in str(checkpoint_damage(folder, digest_once))


@pytest.mark.parametrize("harm", DAMAGES, ids=[harm.__name__ for harm in DAMAGES])
def test_a_damaged_checkpoint_is_restored_from_the_object_store(project: Project, trained, harm, tmp_path: Path):
    mirror = open_mirror(project.home.root, f"file://{tmp_path}/bucket")
    mirror.take_over()
    trained(0, 0)
    policy = trained(1, 2)
    trained(2, 4)  # a later training rests on it
    mirror.finish()
    harm(Path(policy.folder))
    repair_checkpoint(project, policy)
    assert checkpoint_damage(Path(policy.folder)) is None


def test_a_checkpoint_that_is_set_aside_leaves_the_object_store(project: Project, trained, tmp_path: Path):
    mirror = open_mirror(project.home.root, f"file://{tmp_path}/bucket")
    mirror.take_over()
    trained(0, 0)
    policy = trained(1, 2)
    folder = Path(policy.folder)
    mirror.finish()
    with removing(folder / MANIFEST):
        (folder / MANIFEST).unlink()
    mirror.commit()
    with pytest.raises(DamageRepairedError, match=r"manifest\.json is missing"):
        repair_checkpoint(project, policy)
    mirror.commit()
    assert mirror.stored_below(folder) == []
