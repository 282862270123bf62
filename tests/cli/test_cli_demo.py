"""What the demo does with a folder that holds something already, and what it prints when it is interrupted."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from rft_platform.cli.commands.demo import move_aside, prepare
from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.recipes.recipe import recipe_named
from rft_platform.run import start


def test_move_aside_keeps_all_files(home: Home) -> None:
    assert move_aside(home) is None
    write_text(home.config_file, "project: arithmetic\n")
    write_text(home.root / "rounds" / "r0001" / "note.json", "{}")

    moved = move_aside(home)

    assert moved is not None
    assert moved.name.startswith("home.")
    assert (moved / "rounds" / "r0001" / "note.json").exists()
    assert not home.root.exists()


def test_a_folder_that_is_no_project_is_not_moved(home: Home) -> None:
    write_text(home.root / "thesis.tex", "years of work")
    with pytest.raises(UserError, match="is not a project"):
        move_aside(home)
    assert (home.root / "thesis.tex").exists()


def test_a_home_that_cannot_be_is_refused_before_anything_is_made(home: Home, rft: Callable[..., Result]) -> None:
    write_text(home.root, "not a folder")

    result = rft("demo")

    assert result.exit_code == 2
    assert "is a file; point RFT_HOME at a folder" in result.stderr
    assert home.root.read_text() == "not a folder"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], ". exists already: name a new folder"),
        (["my", "--recipe", "maths"], "'maths': expected one of arithmetic, email-search, front-desk, math-agent"),
    ],
)
def test_a_new_project_needs_a_new_folder_and_a_known_recipe(
    arguments: list[str], message: str, home: Home, rft: Callable[..., Result]
) -> None:
    result = rft("new", *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_another_project_is_not_overwritten(home: Home, write_config: Callable[..., Path]) -> None:
    start.write_config(home, load_config(write_config()))

    with pytest.raises(UserError, match=r"holds the project sums/one.*`rft demo --fresh`, which renames /"):
        prepare(home, recipe_named("arithmetic"), "demo", seed=None)


def test_a_recipe_interrupted_in_a_stage_keeps_its_seed(home: Home, write_config: Callable[..., Path]) -> None:
    found = recipe_named("email-search")
    (home.root / found.name).mkdir(parents=True)  # made before the first stage
    assert prepare(home, found, "recipe email-search", seed=3) == 3
    start.write_config(Home(found.stage_home(home.root, "sft")), load_config(write_config(seed=3)))

    assert prepare(home, found, "recipe email-search", seed=None) == 3
    with pytest.raises(UserError, match=r"--seed 4: the project in .*home has seed 3; leave it out to continue"):
        prepare(home, found, "recipe email-search", seed=4)


@pytest.mark.slow
def test_an_interrupted_demo_prints_the_command_that_continues_it(home: Home) -> None:
    command = [sys.executable, "-m", "rft_platform", "demo", "--rounds", "2", "--seed", "3"]
    environment = {**os.environ, "RFT_HOME": str(home.root)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        said = []
        for line in demo.stderr:
            said.append(line)
            if "loading" in line:  # the first stage of the drive
                demo.send_signal(signal.SIGINT)
    assert demo.returncode == 130
    assert "demo --seed 3 --rounds 2` continues this project" in said[-1], said
    assert "demo --seed 3 --rounds 2 --fresh` starts a new one" in said[-1]
