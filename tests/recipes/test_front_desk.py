"""The online demo: a configuration that `rft serve` accepts, and questions whose answers are not given away."""

import json
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.driver.preflight import check_run
from rft_platform.jobs.singleton_lock import singleton_lock
from rft_platform.recipes.front_desk.questions import DEPARTMENTS
from rft_platform.recipes.front_desk.run import move_aside, prepare


def test_the_recipe_is_an_online_project_that_may_start(tmp_path: Path) -> None:
    config = load_config(prepare(tmp_path / "front_desk"))
    assert config.online
    plan = check_run(Home(tmp_path / "home"), config, service=True)
    assert "round k collects rows when 512 are committed" in " ".join(plan.waits)


def test_demonstrations_name_a_department_by_chance_and_held_out_orders_are_new(tmp_path: Path) -> None:
    prepare(tmp_path)
    shown, held_out = (
        [json.loads(line) for line in (tmp_path / "questions" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    right = sum(any(row["question"].startswith(each) for each in DEPARTMENTS[row["answer"]]) for row in shown)
    assert 0.25 < right / len(shown) < 0.42
    assert not {row["question"] for row in shown} & {row["question"] for row in held_out}


@pytest.mark.slow
def test_a_fresh_start_renames_the_folder_of_an_earlier_demo_and_nothing_else(tmp_path: Path) -> None:
    home = Home(tmp_path / "online")
    assert move_aside(home) is None
    home.root.mkdir()
    write_text(home.root / "notes.txt", "mine")
    with pytest.raises(UserError, match="is not this demo's"):
        move_aside(home)

    (home.root / "front_desk").mkdir()
    with singleton_lock(home.leases / "ui.lock", "it"), pytest.raises(UserError, match="`rft serve` of"):
        move_aside(home)
    moved = move_aside(home)
    assert moved is not None
    assert moved.name.startswith("online.")
    assert (moved / "notes.txt").read_text() == "mine"
    assert not home.root.exists()
