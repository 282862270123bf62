"""Versions that a training host publishes reach the home of a serving host, by a shared folder or by fsspec."""

from pathlib import Path

import pytest

from rft_platform.common.digests import THINNED
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_json
from rft_platform.online.forget import forget
from rft_platform.online.releases.exchange import VersionFollower, VersionPublisher, followed_home
from rft_platform.online.releases.versions import servable_versions
from rft_platform.online.traffic.project_traffic import database_url
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, publish, published, read
from rft_platform.rounds.releases.released import released_policy
from rft_platform.run.project_checks import check_may_start
from tests.online.releases.hosts.conftest import DIGEST, host, place_of, train


def test_a_serving_host_takes_the_versions_of_the_training_host(
    hosts: tuple[Project, Project], tiny_model: Path
) -> None:
    serving, training = hosts
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    assert serving.store.rounds() == [], "nothing is published yet"
    publisher = VersionPublisher(training, place_of(training))
    publish(training.store, Policy(str(tiny_model), 0, DIGEST, 0))
    publisher.step()
    follower.step()
    start = published(serving.store, 0)
    assert start is not None and (start.folder, start.policy_version) == (str(tiny_model), 0)
    trained = train(training, 1)
    publisher.step()
    follower.step()
    taken = released_policy(serving)
    assert taken is not None
    assert (taken.policy_version, taken.weights_digest, taken.canary) == (1, trained.weights_digest, trained.canary)
    assert taken.model_version is None, "MLflow of the training host is not that of the serving host"
    assert (Path(taken.folder) / "model.safetensors").read_bytes() == bytes([1]) * 1000
    copied = Path(taken.folder).is_relative_to(serving.home.root)
    assert copied == ("://" in str(serving.config.checkpoint_root_dir))
    assert not copied or not (Path(taken.folder) / "trainer_state").exists()
    assert read(serving.store, 1).judged == Judged(mean_reward=0.25)
    assert followed_home(serving.home) == place_of(serving).url and followed_home(training.home) is None


def test_the_gate_of_the_training_host_decides(
    hosts: tuple[Project, Project], tmp_path: Path, tiny_model: Path
) -> None:
    serving, training = hosts
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1", "answer": "2"}\n')
    held_out = {"explorer_input": {"eval_tasksets": [{"name": "held-out", "path": str(tasks)}]}}
    buffer = {**training.config.buffer.model_dump(include={"train_batch_size", "trainer_input"}), **held_out}
    root = str(training.config.checkpoint_root_dir)
    training = host(training.home.root, "train", root, tiny_model, buffer=buffer)
    train(training, 1)
    train(training, 2, promoted=False)
    VersionPublisher(training, place_of(training)).step()
    VersionFollower(serving, place_of(serving)).step()
    assert [each.released for each in servable_versions(serving)] == [True, False]
    taken = released_policy(serving)
    assert taken is not None and taken.policy_version == 1


def test_a_changed_canary_and_removed_weights_are_followed(hosts: tuple[Project, Project]) -> None:
    serving, training = hosts
    publisher = VersionPublisher(training, place_of(training))
    follower = VersionFollower(serving, place_of(serving))
    old, _ = train(training, 1), train(training, 2)
    publisher.step()
    follower.step()
    publish(training.store, Policy(old.folder, 1, old.weights_digest, 1))  # `rft forget` erased the canary's sequences
    write_json(Path(old.folder) / THINNED, {})
    (Path(old.folder) / "model.safetensors").unlink()
    VersionPublisher(training, place_of(training)).step()  # after a restart
    follower.step()
    assert follower.problem is None
    taken = published(serving.store, 1)
    assert taken is not None and taken.canary is None
    assert not (Path(taken.folder) / "model.safetensors").exists()
    newest = published(serving.store, 2)
    assert newest is not None and (Path(newest.folder) / "model.safetensors").exists()


def test_wrong_homes_are_refused(hosts: tuple[Project, Project], tmp_path: Path, tiny_model: Path) -> None:
    serving, training = hosts
    root = str(training.config.checkpoint_root_dir)
    train(training, 1)
    VersionPublisher(training, place_of(training)).step()
    VersionFollower(serving, place_of(serving)).step()
    with pytest.raises(UserError, match="another home publishes its versions there"):
        VersionPublisher(host(tmp_path / "c", "train", root, tiny_model), place_of(training))
    with pytest.raises(UserError, match="only serves, and its versions come from the home that publishes at"):
        check_may_start(serving.home, training.config)
    with pytest.raises(UserError, match="run `rft forget` there"):
        forget(serving, None, "ann")
    used = host(tmp_path / "d", "serve", root, tiny_model)
    publish(used.store, Policy(str(tiny_model), 0, DIGEST, 0))
    with pytest.raises(UserError, match="holds its own rounds"):
        VersionFollower(used, place_of(used)).step()


def test_both_hosts_find_one_database(tmp_path: Path, tiny_model: Path) -> None:
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    root = tmp_path / "shared"
    urls = {
        database_url(host(tmp_path / mode, mode, str(root), tiny_model, buffer=buffer)) for mode in ("serve", "train")
    }
    assert urls == {f"sqlite:///{root / 'shop' / 'helper' / 'buffer' / 'traffic.db'}"}
