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


@pytest.mark.parametrize(
    "below", ["checkpoints/p/n/global_step_2", "arithmetic/model", "checkpoints/p/n/global_step_4"]
)
def test_a_folder_of_the_home_at_its_old_place_is_the_one_in_this_home(home: Path, below: str) -> None:
    assert from_record(f"/gone/with/home/{below}", home) == home / below


def test_a_folder_of_the_original_is_the_one_in_the_copy(home: Path, tmp_path: Path) -> None:
    original = tmp_path / "original"
    for below in ("rounds", "arithmetic/model"):
        (original / below).mkdir(parents=True)
    assert from_record(str(original / "arithmetic" / "model"), home) == home / "arithmetic" / "model"


def test_an_existing_folder_outside_every_home_stays(home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "arithmetic" / "model"
    outside.mkdir(parents=True)
    assert from_record(str(outside), home) == outside
    assert from_record("/models/base", home) == Path("/models/base")


def test_another_name_of_the_home_is_no_other_home(home: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(home)
    recorded = home / "arithmetic" / "model"
    assert from_record(str(recorded), tmp_path / "link") == recorded


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
