"""Weights on a machine that does not see the home: what is stored of them, what is fetched, and what is kept."""

from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_file, write_sealed_json
from rft_platform.object_store.mirror import open_mirror
from rft_platform.object_store.weights import fetch_weights, lacks_weights, stored_weights

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


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_an_engine_reads_is_stored_and_fetched_without_the_trainer_state(home: Path, tmp_path: Path) -> None:
    folder, there = checkpoint(home, 1), tmp_path / "there" / "global_step_1"
    given = stored(folder)
    assert sorted(given["files"]) == SERVED
    assert lacks_weights(there) and not lacks_weights(folder)
    fetch_weights(there, given)
    assert names(there) == [".fetched", *SERVED]
    assert (there / "model.safetensors").read_text() == "weights"
    assert lacks_weights(there), "the next call names the files again, because they may have changed"


def test_weights_that_changed_are_fetched_again_and_equal_ones_are_not(home: Path, tmp_path: Path) -> None:
    there = tmp_path / "there" / "global_step_1"
    fetch_weights(there, stored(checkpoint(home, 1)))
    before = (there / "model.safetensors").stat().st_ino
    fetch_weights(there, stored(home / "checkpoints" / "policy" / "global_step_1"))
    assert (there / "model.safetensors").stat().st_ino == before
    fetch_weights(there, stored(checkpoint(home, 1, text="trained again")))
    assert (there / "model.safetensors").read_text() == "trained again"


def test_a_folder_of_the_home_is_never_replaced(home: Path) -> None:
    folder = checkpoint(home, 1)
    given = stored(folder)
    (folder / "model.safetensors").write_text("changed here")
    fetch_weights(folder, given)
    assert (folder / "model.safetensors").read_text() == "changed here"


def test_the_newest_fetched_checkpoints_are_kept(home: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "own").mkdir(parents=True)
    for number in (1, 2, 3):
        fetch_weights(there / f"global_step_{number}", stored(checkpoint(home, number)))
    assert sorted(path.name for path in there.iterdir() if path.is_dir()) == ["global_step_2", "global_step_3", "own"]


def test_an_interrupted_fetch_leaves_no_folder(home: Path, tmp_path: Path) -> None:
    there, given = tmp_path / "there" / "global_step_1", stored(checkpoint(home, 1))
    given["files"]["model.safetensors"]["sha256"] = "0" * 64
    given["files"]["model.safetensors"]["size"] = 999
    with pytest.raises(Exception, match=r"attempts to read it have failed|bytes were received"):
        fetch_weights(there, given)
    assert not there.exists()


@pytest.mark.parametrize("name", ["../other/config.json", "/etc/passwd"])
def test_names_outside_the_folder_are_refused(home: Path, tmp_path: Path, name: str) -> None:
    given = stored(checkpoint(home, 1))
    given["files"][name] = given["files"]["config.json"]
    with pytest.raises(UserError, match="is no file of that folder"):
        fetch_weights(tmp_path / "there" / "global_step_1", given)


def test_a_home_without_a_copy_names_nothing(tmp_path: Path) -> None:
    assert stored_weights(checkpoint(tmp_path / "home", 1)) is None


def test_the_background_stores_weights_before_the_states_of_trainers_once_they_are_asked_for(home: Path) -> None:
    mirror = open_mirror(home, (home / "store" / "place.json").read_text().split('"')[3])
    first = checkpoint(home, 1)
    mirror.upload_later()
    mirror.finish()
    before = len(list((home.parent / "store" / "commits").iterdir()))
    assert sorted(stored(first)["files"]) == SERVED
    assert len(list((home.parent / "store" / "commits").iterdir())) == before, "all of it was stored already"
    checkpoint(home, 2)
    mirror.upload_later()
    mirror.finish()
    assert len(list((home.parent / "store" / "commits").iterdir())) == before + 2
