"""Whoever writes to the place that two hosts share, but has no key, changes nothing on the serving host."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.online.forget import forget
from rft_platform.online.releases.exchange import OWNER, VersionFollower, VersionPublisher
from rft_platform.online.releases.shared_place import EXCHANGE_KEY, MOST_BYTES, Owner, Record, exchange_key, signed
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import publish, published
from rft_platform.rounds.releases.released import released_policy
from tests.online.releases.hosts.conftest import DIGEST, KEY, host, place_of, train

Change = Callable[[dict[str, Any]], object]


def records(project: Project) -> Path:
    """The folder of the published documents, in both kinds of shared place."""
    folder = str(project.config.checkpoint_root_dir).removeprefix("file://")
    return Path(folder) / "shop" / "helper" / "published"


def document(project: Project, number: int) -> dict[str, Any]:
    return dict(json.loads((records(project) / f"r{number:04d}.json").read_text()))


def follow(serving: Project, training: Project) -> VersionFollower:
    """Publish what was trained, and follow it once."""
    VersionPublisher(training, place_of(training)).step()
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    return follower


def with_valid_signature(record: dict[str, Any], **changes: Any) -> bytes:
    """A record with a valid signature, whose content the schema would refuse."""
    content = {name: value for name, value in record.items() if name != "signature"}
    return signed(Record.model_construct(**{**content, **changes}), KEY.encode())


CHANGES: dict[str, Change] = {
    "absolute folder": lambda record: record["weights"].update(folder="/tmp", kept=False),
    "folder above": lambda record: record["weights"].update(folder="../../global_step_1", kept=False),
    "another version": lambda record: record.update(policy_version=9),
    "digest of other weights": lambda record: record.update(weights_digest="1" * 64),
    "digest of another file": lambda record: record["weights"]["files"].popitem(),
    "released": lambda record: record["evaluation"].update(released=False),
    "wrong signature": lambda record: record.update(signature="0" * 64),
    "no signature": lambda record: record.pop("signature"),
    "signature of a wrong type": lambda record: record.update(signature=[1]),
    "signature that is not ASCII": lambda record: record.update(signature="\u00e9"),
    "lone surrogate": lambda record: record.update(project="\ud800"),
}


@pytest.mark.parametrize("root", ["folder"], indirect=True)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_record_is_left_out_and_the_next_one_is_taken(
    hosts: tuple[Project, Project], change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    serving, training = hosts
    train(training, 1), train(training, 2)
    VersionPublisher(training, place_of(training)).step()
    forged = document(training, 1)
    change(forged)
    (records(training) / "r0001.json").write_text(json.dumps(forged))
    follower = VersionFollower(serving, place_of(serving))
    for _ in range(3):
        follower.step()
    assert published(serving.store, 1) is None
    taken = released_policy(serving)
    assert taken is not None and taken.policy_version == 2
    assert follower.problem is not None and "r0001.json" in follower.problem
    assert len([line for line in caplog.messages if "r0001.json" in line]) == 1


@pytest.mark.parametrize("root", ["folder"], indirect=True)
@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"null", b"[" * 100_000, b"{}", b" " * (MOST_BYTES + 2)],
    ids=["empty", "bytes", "list", "null", "deep", "no fields", "huge"],
)  # fmt: skip
def test_a_document_of_another_kind_is_left_out(hosts: tuple[Project, Project], content: bytes) -> None:
    serving, training = hosts
    train(training, 1), train(training, 2)
    VersionPublisher(training, place_of(training)).step()
    (records(training) / "r0001.json").write_bytes(content)
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    assert serving.store.rounds() == [2]
    assert follower.problem is not None and "r0001.json" in follower.problem


FILE = {"size": 1, "sha256": DIGEST}
SIGNED: dict[str, dict[str, Any]] = {
    "absolute folder": {"weights": {"folder": "/tmp/global_step_1", "kept": False, "files": {}}},
    "folder above": {"weights": {"folder": "../global_step_1", "kept": True, "files": {}}},
    "file above": {"weights": {"folder": "global_step_1", "kept": True, "files": {"../a": FILE}}},
    "absolute file": {"weights": {"folder": "global_step_1", "kept": True, "files": {"/a": FILE}}},
    "number as text": {"policy_version": "1"},
    "negative version": {"policy_version": -1},
    "another project": {"project": "shop/other"},
    "another home": {"home": "f" * 32},
    "another round": {"round": 3},
    "evaluation is a list": {"evaluation": []},
}  # fmt: skip


@pytest.mark.parametrize("root", ["folder"], indirect=True)
@pytest.mark.parametrize("changes", SIGNED.values(), ids=SIGNED)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_signed_record_that_is_not_valid_here_is_left_out(
    hosts: tuple[Project, Project], changes: dict[str, Any]
) -> None:
    serving, training = hosts
    train(training, 1), train(training, 2)
    VersionPublisher(training, place_of(training)).step()
    record = document(training, 1)
    (records(training) / "r0001.json").write_bytes(with_valid_signature(record, **changes))
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    assert serving.store.rounds() == [2]
    assert follower.problem is not None and "r0001.json" in follower.problem


def test_a_record_is_not_valid_under_another_name(hosts: tuple[Project, Project]) -> None:
    serving, training = hosts
    train(training, 1), train(training, 2)
    follow(serving, training)
    shutil.copy(records(training) / "r0001.json", records(training) / "r0003.json")
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    assert serving.store.rounds() == [1, 2]
    assert follower.problem is not None and "r0003.json: it is the record r0001" in follower.problem


def test_a_signature_is_not_valid_for_another_record(hosts: tuple[Project, Project]) -> None:
    serving, training = hosts
    train(training, 1), train(training, 2)
    VersionPublisher(training, place_of(training)).step()
    one, other = document(training, 1), document(training, 2)
    (records(training) / "r0001.json").write_text(json.dumps({**one, "signature": other["signature"]}))
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    assert serving.store.rounds() == [2]
    assert follower.problem is not None and "r0001.json: its signature is not valid" in follower.problem


def test_an_older_record_is_not_taken_again(hosts: tuple[Project, Project]) -> None:
    serving, training = hosts
    trained = train(training, 1)
    follow(serving, training)
    older = (records(training) / "r0001.json").read_bytes()
    changed = type(trained)(trained.folder, 1, trained.weights_digest, 1)  # without its canary
    publish(training.store, changed)
    follow(serving, training)
    (records(training) / "r0001.json").write_bytes(older)
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    taken = published(serving.store, 1)
    assert taken is not None and taken.canary is None
    assert follower.problem is not None and "newer record" in follower.problem


def test_files_that_the_record_does_not_name_are_not_served(hosts: tuple[Project, Project]) -> None:
    serving, training = hosts
    train(training, 1), train(training, 2)
    VersionPublisher(training, place_of(training)).step()
    (records(training).parent / "global_step_1" / "model.safetensors").write_bytes(b"\2" * 1000)
    (records(training).parent / "global_step_2" / "usercustomize.py").write_text("")
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    assert published(serving.store, 1) is None
    assert follower.problem is not None and "model.safetensors was changed" in follower.problem
    taken = published(serving.store, 2)
    copied = taken is not None and Path(taken.folder).is_relative_to(serving.home.root)
    assert taken is not None and (Path(taken.folder) / "usercustomize.py").exists() is not copied


def test_a_link_in_place_of_a_checkpoint_is_not_followed(
    hosts: tuple[Project, Project], tmp_path: Path, root: str
) -> None:
    serving, training = hosts
    train(training, 1)
    VersionPublisher(training, place_of(training)).step()
    folder = (serving if "://" in root else training).checkpoints / "global_step_1"
    elsewhere = tmp_path / "elsewhere"
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(training.checkpoints / "global_step_1", elsewhere)
    if folder.exists():
        shutil.rmtree(folder)
    folder.symlink_to(elsewhere)
    follower = VersionFollower(serving, place_of(serving))
    follower.step()
    assert serving.store.rounds() == [] and elsewhere.is_dir()
    assert follower.problem is not None and "is a link" in follower.problem


def test_a_host_with_another_key_is_refused(hosts: tuple[Project, Project], monkeypatch: pytest.MonkeyPatch) -> None:
    serving, training = hosts
    train(training, 1)
    VersionPublisher(training, place_of(training)).step()
    monkeypatch.setenv(EXCHANGE_KEY, "another key of this test, 32 characters")
    with pytest.raises(UserError, match=f"home.json: .*the host that wrote it has another {EXCHANGE_KEY}"):
        VersionPublisher(training, place_of(training))
    with pytest.raises(Exception, match=EXCHANGE_KEY):
        VersionFollower(serving, place_of(serving)).step()
    assert serving.store.rounds() == []


@pytest.mark.parametrize("given", ["", "too short"])
def test_a_missing_key_is_refused_before_anything_happens(
    hosts: tuple[Project, Project], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    _, training = hosts
    monkeypatch.setenv(EXCHANGE_KEY, given)
    with pytest.raises(UserError, match="openssl rand -hex 32"):
        exchange_key(training.config)
    with pytest.raises(UserError, match=EXCHANGE_KEY):
        forget(training, None, "ann")
    assert exchange_key(training.config.model_copy(update={"mode": "both"})) is None
    assert exchange_key(training.config.model_copy(update={"checkpoint_root_dir": None})) is None


def test_a_home_that_lost_its_exchange_folder_to_another_publishes_nothing(
    tmp_path: Path, root: str, tiny_model: Path
) -> None:
    training = host(tmp_path / "b", "train", root, tiny_model)
    place = place_of(training)
    publisher = VersionPublisher(training, place)
    other = Owner(home="f" * 32, project="shop/helper")
    place.create(OWNER, other)
    VersionPublisher(training, place)  # the document of the other home was not written
    place.write(OWNER, other)  # a store without exclusive creation: the other home had looked before
    train(training, 1)
    with pytest.raises(UserError, match="another home publishes its versions there"):
        publisher.step()
    assert not (records(training) / "r0001.json").exists()
