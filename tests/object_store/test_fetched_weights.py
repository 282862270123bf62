"""Weights on a machine that does not see the home: what is stored of them, what is fetched, and what is kept."""

import errno
import hashlib
from pathlib import Path
from typing import Any, cast

import pytest

from rft_platform.cluster.local.locks import try_lock
from rft_platform.common.errors import DamagedError, DiskFullError, StorageError, TransientError, UserError
from rft_platform.common.files import digest_file, write_sealed_json
from rft_platform.inference.serving.control_api import ControlPlane
from rft_platform.object_store import remote_files
from rft_platform.object_store.mirror import open_mirror
from rft_platform.object_store.weights import fetch_weights, lacks_weights, served_weights, stored_weights

FILES = {
    "config.json": "{}",
    "model.safetensors": "weights",
    "additional_chat_templates/tools.jinja": "template",
    "trainer_state/optimizer.safetensors": "moments",
    "steps.json": "[]",
}
SERVED = ["additional_chat_templates/tools.jinja", "config.json", "model.safetensors"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home that has claimed a project on a store."""
    root = tmp_path / "home"
    open_mirror(root, f"file://{tmp_path}/store").take_over()
    return root


def checkpoint(home: Path, number: int, text: str = "weights") -> Path:
    folder = home / "checkpoints" / "policy" / f"global_step_{number}"
    for name, content in {**FILES, "model.safetensors": text}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    files = {"model.safetensors": {"sha256": digest_file(folder / "model.safetensors")}}
    write_sealed_json(folder / "manifest.json", {"files": files})
    return folder


def stored(folder: Path) -> dict[str, Any]:
    found = stored_weights(folder)
    assert found is not None
    return found


def fetch(folder: Path, given: dict[str, Any]) -> None:
    if (kept := fetch_weights(folder, given)) is not None:
        kept.close()


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_an_engine_reads_is_stored_and_fetched_without_the_trainer_state(home: Path, tmp_path: Path) -> None:
    folder, there = checkpoint(home, 1), tmp_path / "there" / "global_step_1"
    given = stored(folder)
    assert sorted(given["files"]) == SERVED
    assert lacks_weights(there) and not lacks_weights(folder)
    fetch(there, given)
    assert names(there) == [".fetched", *SERVED]
    assert (there / "model.safetensors").read_text() == "weights"
    assert lacks_weights(there), "the next call names the files again, because they may have changed"


def test_weights_that_changed_are_fetched_again_and_equal_ones_are_not(home: Path, tmp_path: Path) -> None:
    there = tmp_path / "there" / "global_step_1"
    fetch(there, stored(checkpoint(home, 1)))
    before = (there / "model.safetensors").stat().st_ino
    fetch(there, stored(home / "checkpoints" / "policy" / "global_step_1"))
    assert (there / "model.safetensors").stat().st_ino == before
    fetch(there, stored(checkpoint(home, 1, text="trained again")))
    assert (there / "model.safetensors").read_text() == "trained again"


def test_a_folder_of_the_home_is_never_replaced(home: Path) -> None:
    folder = checkpoint(home, 1)
    given = stored(folder)
    (folder / "model.safetensors").write_text("changed here")
    fetch(folder, given)
    assert (folder / "model.safetensors").read_text() == "changed here"


def test_the_next_fetch_removes_what_no_engine_serves(home: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "own").mkdir(parents=True)
    killed = there / ".global_step_9.000000-1-00000000.tmp"
    killed.mkdir()

    def fetched(number: int) -> Path:
        fetch(there / f"global_step_{number}", stored(checkpoint(home, number)))
        return there / f"global_step_{number}"

    served = served_weights(fetched(1))
    assert served is not None
    fetched(2)
    assert served_weights(fetched(3) / "config.json") is None, "not a fetched folder"
    left = sorted(path.name for path in there.iterdir() if path.is_dir())
    assert left == ["global_step_1", "global_step_3", "own"]
    served.close()
    fetched(4)
    assert sorted(path.name for path in there.iterdir() if path.is_dir()) == ["global_step_4", "own"]


async def test_fetched_weights_stay_until_the_engine_has_loaded_them(home: Path, tmp_path: Path) -> None:
    first, second = (tmp_path / "there" / f"global_step_{number}" for number in (1, 2))
    unused: Any = None
    control = ControlPlane(unused, unused)
    await control.fetch_weights({"folder": str(first), "stored": stored(checkpoint(home, 1))}, unused)
    fetch(second, stored(checkpoint(home, 2)))  # for another engine on this machine
    assert names(first) == [".fetched", *SERVED]
    control._keep("fetched", None)


def test_weights_that_another_process_removes_are_not_served(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there" / "global_step_1"
    fetch(folder, stored(checkpoint(home, 1)))
    with (folder / ".fetched").open() as mark:
        assert try_lock(mark)
        assert served_weights(folder) is None


def test_weights_that_are_not_stored_are_refused_by_name(home: Path, tmp_path: Path) -> None:
    folder = checkpoint(home, 1)
    (folder / "model.safetensors").write_text("damaged")
    with pytest.raises(DamagedError, match=r"model.safetensors: differs from its record, and is not stored"):
        stored_weights(folder)
    thinned = checkpoint(home, 2)
    (thinned / "model.safetensors").unlink()
    with pytest.raises(DamagedError, match=f"{thinned}: .*store holds no weights of it"):
        stored_weights(thinned)


def test_a_full_disk_and_a_missing_object_are_named_at_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, given = tmp_path / "there" / "global_step_1", stored(checkpoint(home, 1))
    lost = {**given, "files": {"config.json": {**given["files"]["config.json"], "object": "files/lost"}}}
    with pytest.raises(StorageError, match=r"does not find an object of it in .*check the address and the keys"):
        fetch(there, lost)
    reads = []

    def full(self: Path, data: bytes) -> int:
        reads.append(self)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskFullError):
        fetch(there, given)
    assert len(reads) <= len(given["files"]), "a full disk is no reason to download again"


def test_a_folder_that_cannot_be_written_is_no_fault_of_the_store(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, given = tmp_path / "there" / "global_step_1", stored(checkpoint(home, 1))

    def denied(self: Path, data: bytes) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_bytes", denied)
    with pytest.raises(UserError, match=f"{there}: this machine cannot write there"):
        fetch(there, given)


def test_a_file_that_vanishes_during_its_upload_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "_PART", 1)
    remote, source = remote_files.RemoteFiles(f"file://{tmp_path}/store"), tmp_path / "model.safetensors"
    source.write_bytes(b"weights")
    monkeypatch.setattr(remote._files, "put_file", lambda *_: source.unlink() or source.read_bytes())
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        remote.upload({"files/1": source})


def test_a_large_file_arrives_in_parts_and_is_compared_with_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "_PART", 2)
    remote, target = remote_files.RemoteFiles(f"file://{tmp_path}/store"), tmp_path / "model.safetensors"
    remote.write("files/1", b"weights")
    remote.download({target: remote_files.StoredFile("files/1", 7, hashlib.sha256(b"weights").hexdigest())})
    assert target.read_bytes() == b"weights"
    with pytest.raises(TransientError, match="files/1: its content does not have the digest"):
        remote.download({target: remote_files.StoredFile("files/1", 7, "0")})


def test_a_large_file_that_arrives_damaged_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "_PART", 2)
    remote, target = remote_files.RemoteFiles(f"file://{tmp_path}/store"), tmp_path / "model.safetensors"
    remote.write("files/1", b"weights")
    parts = iter([b"XX"])
    read = remote._part
    monkeypatch.setattr(remote, "_part", lambda *place: next(parts, None) or read(*place))
    remote.download({target: remote_files.StoredFile("files/1", 7, hashlib.sha256(b"weights").hexdigest())})
    assert target.read_bytes() == b"weights"


async def test_weights_that_were_fetched_and_never_served_go_with_the_next_fetch(home: Path, tmp_path: Path) -> None:
    plane, there = ControlPlane(cast(Any, None), lambda: None), tmp_path / "there"
    for number in (1, 2):
        folder = there / f"global_step_{number}"
        body = {"folder": str(folder), "stored": stored(checkpoint(home, number))}
        await plane.fetch_weights(body, cast(Any, None))
    assert [path.name for path in there.iterdir() if path.is_dir()] == ["global_step_2"]
    plane._keep("fetched", None)


def test_an_interrupted_fetch_leaves_no_folder(home: Path, tmp_path: Path) -> None:
    there, given = tmp_path / "there" / "global_step_1", stored(checkpoint(home, 1))
    given["files"]["model.safetensors"]["object"] = "files/lost"
    with pytest.raises(StorageError):
        fetch(there, given)
    assert not there.exists()


@pytest.mark.parametrize("name", ["../other/config.json", "/etc/passwd"])
def test_names_outside_the_folder_are_refused(home: Path, tmp_path: Path, name: str) -> None:
    given = stored(checkpoint(home, 1))
    given["files"][name] = given["files"]["config.json"]
    with pytest.raises(UserError, match="is no file of that folder"):
        fetch(tmp_path / "there" / "global_step_1", given)


def test_a_home_without_a_copy_names_nothing(tmp_path: Path) -> None:
    assert stored_weights(checkpoint(tmp_path / "home", 1)) is None


def test_weights_are_uploaded_once_and_before_the_states_of_trainers(home: Path) -> None:
    mirror = open_mirror(home, (home / "store" / "place.json").read_text().split('"')[3])
    folder = checkpoint(home, 1)
    mirror.upload_later()
    assert sorted(stored(folder)["files"]) == SERVED
    mirror.finish()
    files = [path.name.partition("-")[2] for path in (home.parent / "store" / "files").rglob("*") if path.is_file()]
    assert len(files) == len(set(files))
