"""A project's folder takes one project, and goes on only with the settings it was begun with."""

import errno
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_sealed_json
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store.mirror import open_mirror
from rft_platform.run import start
from rft_platform.run.project_checks import check_may_start
from rft_platform.run.start import with_rounds


def begin(home: Home, config: RftConfig) -> None:
    """A project that a phase has left something of."""
    start.write_config(home, config)
    write_sealed_json(home.rounds / "r0000" / "policy-policy.json", {})


def test_what_is_put_in_force_reads_back_equal(home: Home, write_config: Callable[..., Path]) -> None:
    config = load_config(write_config())

    start.write_config(home, config)

    assert load_config(home.config_file) == config
    check_may_start(home, config)


def test_the_file_in_a_home_names_its_own_files_by_relative_paths(
    home: Home, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = load_config(write_config())
    home.root.mkdir()
    model = Path(config.model.model_path).rename(home.root / "model")
    config = config.model_copy(update={"model": config.model.model_copy(update={"model_path": str(model)})})

    start.write_config(home, config)

    assert load_config(home.config_file) == config
    moved = Home(home.root.rename(tmp_path / "moved"))
    assert load_config(moved.config_file).model.model_path == str(moved.root / "model")


def test_another_project_is_refused(home: Home, write_config: Callable[..., Path]) -> None:
    begin(home, load_config(write_config()))

    with pytest.raises(UserError, match="holds the project sums/one, not sums/two: point RFT_HOME"):
        check_may_start(home, load_config(write_config(name="two")))


def test_the_error_names_changed_settings(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    begin(home, load_config(write_config()))

    result = rft("run", "--config", write_config(seed=7, algorithm={"repeat_times": 2}))

    assert result.exit_code == 2
    assert "error: seed: was 42, is 7" in result.stderr
    assert "error: algorithm.repeat_times: was 4, is 2" in result.stderr
    assert load_config(home.config_file).seed == 42


def test_the_number_of_rounds_may_change(home: Home, write_config: Callable[..., Path]) -> None:
    config = load_config(write_config(synchronizer={"sync_interval": 3}))
    start.write_config(home, config)

    longer = with_rounds(config, 5)

    length = resolve(longer).length()
    assert length is not None and length.rounds == 5
    assert longer.buffer.total_steps == 15
    check_may_start(home, longer)
    assert with_rounds(config, None) is config


def test_a_new_project_has_the_correction_of_its_preset(home: Home, write_config: Callable[..., Path]) -> None:
    config = load_config(write_config(algorithm={"algorithm_type": "gspo"}))
    start.write_config(home, load_config(write_config(algorithm={"rollout_correction": {"mode": "bypass"}})))

    start.write_config(home, config)

    assert load_config(home.config_file) == config, "no result is stored yet"
    assert resolve(config).spec.correction == "decoupled"
    begin(home, config)
    check_may_start(home, config)


def test_a_new_start_over_existing_rounds_is_refused(home: Home, write_config: Callable[..., Path]) -> None:
    config = load_config(write_config(continue_from_checkpoint=False))
    start.write_config(home, config)
    check_may_start(home, config)
    begin(home, config)

    with pytest.raises(UserError, match="continue_from_checkpoint is false"):
        check_may_start(home, config)


def test_an_existing_home_is_made_private_at_the_next_command(
    home: Home, write_config: Callable[..., Path], rft: Callable[..., Result]
) -> None:
    start.write_config(home, load_config(write_config()))
    (home.root / "rounds").mkdir()
    for path in (home.root, home.root / "rounds"):
        path.chmod(0o755)
    (home.root / "rounds" / "note.json").write_text("{}")
    (home.root / "rounds" / "note.json").chmod(0o644)
    (home.root / "run.sh").write_text("")
    (home.root / "run.sh").chmod(0o755)

    result = rft("rounds")

    assert f"note: {home.root} was open to other users of this machine" in result.stderr
    paths = [home.root, *home.root.rglob("*")]
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    assert stat.S_IMODE((home.root / "run.sh").stat().st_mode) == 0o700
    assert "other users" not in rft("rounds").stderr


def test_a_home_of_another_user_is_left_alone(
    home: Home, write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the root of a mounted volume: only its owner may change its mode."""
    start.write_config(home, load_config(write_config()))
    home.root.chmod(0o755)
    home.config_file.chmod(0o644)
    changed: list[Path] = []

    def chmod(path: Path, mode: int) -> None:
        changed.append(path)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", chmod)
    assert home.make_private() is None
    assert changed == [home.root]


def test_a_folder_that_is_no_project_keeps_its_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rft: Callable[..., Result]
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("RFT_HOME", str(tmp_path))

    rft("rounds")

    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_start_that_is_refused_does_not_stop_the_home_that_drives_the_project(
    home: Home, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/bucket"
    driving = open_mirror(tmp_path / "driving", url)
    driving.take_over()
    driving._driver.write(0)
    config = load_config(write_config(store_url=url, buffer={"batch_size": 8, "total_steps": 2}))
    with pytest.raises(UserError):
        start.begin(home, config)
    store = ExperienceStore(tmp_path / "driving" / "rounds")
    store.write_note(1, "explore", {"rows": 4})
    assert store.has_note(1, "explore") and not home.config_file.exists()
