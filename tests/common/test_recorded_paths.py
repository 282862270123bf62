"""How paths are stored in a home, and what they stand for in another place."""

from pathlib import Path

import pytest

from rft_platform.common.recorded_paths import from_manifest, from_record, to_record


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a base model and a checkpoint."""
    made = tmp_path / "here" / "home"
    for below in ("rounds", "arithmetic/model", "checkpoints/p/n/global_step_2"):
        (made / below).mkdir(parents=True)
    return made


def test_what_moves_with_the_home_is_stored_relative_to_it(home: Path) -> None:
    for path, stored in (
        (home / "checkpoints" / "p" / "n" / "global_step_2", "checkpoints/p/n/global_step_2"),
        (home.parent / "global_step_2", "../global_step_2"),  # the layout of tune(): the home is in its checkpoints
    ):
        assert to_record(path, home) == stored
        assert from_record(stored, home) == path
        other = home.parents[1] / "there" / "home"
        assert from_record(stored, other).is_relative_to(other.parent)


@pytest.mark.parametrize("path", ["/models/base", "org/model", "models:/name@champion"])
def test_other_places_and_names_are_stored_as_they_are(home: Path, path: str) -> None:
    assert to_record(path, home) == path


def test_a_base_model_beside_the_home_is_stored_as_it_is(home: Path) -> None:
    assert to_record(home.parent / "model", home) == str(home.parent / "model")


def test_a_link_to_the_home_makes_no_difference(home: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(home)
    for one, other in ((home, link), (link, home)):
        assert to_record(one / "arithmetic" / "model", other) == "arithmetic/model"


def test_a_recorded_path_outside_the_home_is_not_searched_in_it(home: Path) -> None:
    """A file of the same name in the home is another file."""
    (home / "train.jsonl").touch()
    assert from_record("/gone/train.jsonl", home) == Path("/gone/train.jsonl")


def test_a_manifest_names_folders_that_moved_with_it(home: Path) -> None:
    checkpoint, output = home / "checkpoints" / "p" / "n" / "global_step_2", "/old/home/checkpoints/p/n"
    for recorded, now in (
        (f"{output}/global_step_2", checkpoint),
        ("/old/home/arithmetic/model", home / "arithmetic" / "model"),
        ("/models/base", Path("/models/base")),
        (f"{output}/global_step_0", Path(output, "global_step_0")),  # not here
    ):
        assert from_manifest(recorded, output, checkpoint) == now
    assert from_manifest("/old/home/arithmetic/model", None, checkpoint) == Path("/old/home/arithmetic/model")
    assert from_manifest("org/model", output, checkpoint) == Path("org/model")
