"""Old checkpoints lose their weights, never the ones that somebody needs, and never their manifests."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rft_platform.common.digests import MANIFEST, SAVED_STATE, THINNED, checkpoint_damage
from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_file, write_json, write_sealed_json, write_text
from rft_platform.config.home import Home
from rft_platform.model_registry.manifests import chain
from rft_platform.model_registry.models import PREVIOUS_TAG, RegisteredModel
from rft_platform.object_store.mirror import HomeMirror, open_mirror, store_changes
from rft_platform.online.project import open_project, project_in
from rft_platform.online.releases.rules import canary_rule
from rft_platform.online.releases.store import ReleaseStore
from rft_platform.online.releases.versions import release_commands
from rft_platform.online.traffic.project_traffic import traffic_database
from rft_platform.rounds.maintenance import checkpoint_retention
from rft_platform.rounds.maintenance.checkpoint_retention import DISCARDED, needed_to_repeat, thin_checkpoints
from rft_platform.rounds.project.policy import take_snapshot
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, publish, write, write_snapshot


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
    """Six rounds trained, of which the third was a no-op; the sixth may go."""
    home = Home(tmp_path / "home")
    settings = {"trainer": {"max_checkpoints_to_keep": 2}, "model": {"model_path": "base"}}
    write_text(home.config_file, yaml.safe_dump({**settings, "project": "p", "name": "n"}))
    opened = open_project(home)
    for number in range(7):
        folder = checkpoint(opened, number)
        if number != 3:
            make(folder, number)
        publish(opened.store, Policy(str(folder), number, "w", round=number))
    return opened


def checkpoint(project: Project, number: int) -> Path:
    return project.checkpoints / f"global_step_{2 if number == 3 else number}"


def make(folder: Path, number: int) -> None:
    (folder / "trainer_state").mkdir(parents=True)
    for name in ("model.safetensors", "trainer_state/optimizer.safetensors"):
        (folder / name).write_bytes(bytes([number]) * 100)
    files = {n: {"size": 100, "sha256": digest_file(folder / n)} for n in ("model.safetensors",)}
    parent = folder.with_name(f"global_step_{number - 1 - (number == 4)}")
    write_sealed_json(
        folder / MANIFEST,
        {
            "files": files, "parent": str(parent), "policy_version": number, "parent_version": number - 1,
            "weights_digest": "w", "lineage": {"round": number},
        },
    )  # fmt: skip


def whole(project: Project) -> list[int]:
    return [n for n in (0, 1, 2, 4, 5, 6) if checkpoint_damage(checkpoint(project, n)) is None]


def test_policies_at_multiples_of_so_many_steps_stay_whole_too(project: Project) -> None:
    settings = project.config.trainer.model_copy(update={"keep_every": 4})
    marked = project_in(project.home, project.config.model_copy(update={"trainer": settings}))
    thin_checkpoints(marked, Registry())  # type: ignore[arg-type]
    assert whole(marked) == [0, 4, 5, 6]


def served(project: Project) -> Project:
    """The project as one of production traffic."""
    stored = yaml.safe_load(project.home.config_file.read_text())
    online = {"trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    write_text(project.home.config_file, yaml.safe_dump({**stored, "buffer": online}))
    return open_project(project.home)


def test_the_version_of_a_rollback_stays_whole_and_none_serves_without_weights(project: Project) -> None:
    opened = served(project)
    for number in range(1, 7):
        write(opened.store, number, RoundEvaluation())
    commands = release_commands(opened)
    commands.promote(4)
    thin_checkpoints(opened, Registry())  # type: ignore[arg-type]
    assert whole(opened) == [0, 2, 4, 5, 6]
    with pytest.raises(UserError, match=r"version 1 cannot serve, .* are kept, which are 0, 2, 3, 4, 5, 6"):
        commands.promote(1)
    assert [commands.roll_back() for _ in range(3)] == [3, 2, 0], "version 3 has the weights of 2"


def test_versions_in_production_stay_whole(project: Project) -> None:
    opened = served(project)
    releases = ReleaseStore(traffic_database(opened))
    releases.serve(2, "rolled_back", "by hand")
    releases.start("canary", 2, 4, 0.1, "conversation", canary_rule(), "a try")
    thin_checkpoints(opened, Registry())  # type: ignore[arg-type]
    assert whole(opened) == [0, 2, 4, 5, 6]


def test_retention_keeps_the_newest_and_first_checkpoints_and_the_lineage(project: Project) -> None:
    removed = thin_checkpoints(project, Registry())  # type: ignore[arg-type]
    assert [path.name for path in removed] == ["global_step_1", "global_step_2", "global_step_4"]
    assert whole(project) == [0, 5, 6]
    assert sorted(path.name for path in checkpoint(project, 4).iterdir()) == [MANIFEST, "thinned.json"]
    assert [manifest.policy_version for manifest in chain(checkpoint(project, 6))] == [6, 5, 4, 2, 1, 0]
    why = checkpoint_damage(checkpoint(project, 4))
    assert why is not None and "trainer.max_checkpoints_to_keep" in why
    assert thin_checkpoints(project, Registry()) == []  # type: ignore[arg-type]


def test_the_champion_and_the_one_before_it_stay(project: Project) -> None:
    before = RegisteredModel("m", 1, checkpoint(project, 1))
    champion = RegisteredModel("m", 2, checkpoint(project, 2), tags={PREVIOUS_TAG: "1"})
    thin_checkpoints(project, Registry(before, champion))  # type: ignore[arg-type]
    assert whole(project) == [0, 1, 2, 5, 6]


def test_what_a_round_explores_with_stays(project: Project) -> None:
    write_snapshot(project.store, 7, Policy(str(checkpoint(project, 4)), 4, "w", round=4))
    assert take_snapshot(project.store, 7, 0).folder == str(checkpoint(project, 4))
    thin_checkpoints(project, Registry())  # type: ignore[arg-type]
    assert whole(project) == [0, 4, 5, 6]


def test_without_a_limit_nothing_is_removed(project: Project) -> None:
    settings = project.config.trainer.model_copy(update={"max_checkpoints_to_keep": None})
    free = replace(project, config=project.config.model_copy(update={"trainer": settings}))
    assert thin_checkpoints(free, Registry()) == []  # type: ignore[arg-type]
    assert whole(project) == [0, 1, 2, 4, 5, 6]


def test_an_interrupted_removal_is_completed(project: Project) -> None:
    write_json(checkpoint(project, 1) / "thinned.json", {})
    (checkpoint(project, 1) / "model.safetensors").unlink()
    thin_checkpoints(project, Registry())  # type: ignore[arg-type]
    assert not (checkpoint(project, 1) / "trainer_state").exists()


def test_removed_files_are_deleted_in_the_background_also_those_of_a_killed_process(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_retention, "_DELAY_S", 0.1)
    discarded = project.checkpoints / DISCARDED
    (discarded / "removed.global_step_0.trainer_state.0").mkdir(parents=True)
    (discarded / "removed.global_step_0.model.safetensors.0").write_bytes(b"0")
    assert thin_checkpoints(project, Registry())  # type: ignore[arg-type]
    for thread in threading.enumerate():
        if thread.name == "delete-checkpoints":
            thread.join()
    assert list(discarded.iterdir()) == []


def test_policies_that_a_killed_trainer_repeats_are_kept(project: Project) -> None:
    """The newest policy has no trainer state: its training is repeated from the newest saved one, which stays."""
    for number in (5, 6):
        write_sealed_json(checkpoint(project, number) / "manifest.json", {"deferred_state": True, "files": {}})
    limited = project.config.trainer.model_copy(update={"max_checkpoints_to_keep": 1})
    one = replace(project, config=project.config.model_copy(update={"trainer": limited}))
    assert [Path(policy.folder).name for policy in needed_to_repeat(one)] == [
        checkpoint(project, number).name for number in (6, 5, 4)
    ]
    thin_checkpoints(one, Registry())  # type: ignore[arg-type]
    assert {4, 5, 6} <= set(whole(project))
    (checkpoint(project, 6) / "trainer_state").mkdir(exist_ok=True)
    write_sealed_json(checkpoint(project, 6) / SAVED_STATE, {"files": {}})
    assert [policy.round for policy in needed_to_repeat(one)] == [6]


def test_weights_that_only_the_object_store_has_are_removed_there(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_mirror(project.home.root, f"file://{tmp_path}/bucket").take_over()
    store_changes(project.home.root)
    second = Home(tmp_path / "second")
    mirror = open_mirror(second.root, f"file://{tmp_path}/bucket")
    mirror.take_over()
    taken = open_project(second)
    old = checkpoint(taken, 2)
    assert mirror.stored(old / "model.safetensors") is not None and not (old / "model.safetensors").exists()
    asked, stored_below = list[Path](), HomeMirror.stored_below

    def counted(self: HomeMirror, folder: Path) -> list[Path]:
        asked.append(folder)
        return stored_below(self, folder)

    monkeypatch.setattr(HomeMirror, "stored_below", counted)
    assert old in thin_checkpoints(taken, Registry())  # type: ignore[arg-type]
    assert thin_checkpoints(taken, Registry()) == []  # type: ignore[arg-type]
    assert asked == [taken.checkpoints] * 2  # once for all old checkpoints
    mirror.commit()
    assert mirror.stored_below(old) == [old / MANIFEST, old / THINNED]
    fetched = checkpoint(taken, 6)
    mirror.fetch([old, fetched])
    assert not (old / "model.safetensors").exists() and (fetched / "model.safetensors").exists()
