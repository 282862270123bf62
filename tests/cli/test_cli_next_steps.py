"""What is printed at the end of a run: commands that work as they stand."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.rounds.project.project import Project
from rft_platform.run import start
from rft_platform.run.next_steps import print_next_steps, rft_command, rft_command_with


def test_the_command_works_where_the_environment_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    command = rft_command(Home(tmp_path / "my home"))

    assert command.startswith("RFT_HOME='my home' /")
    done = subprocess.run(f"{command} --version", shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_shown_command_is_short_if_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))
    assert rft_command(Home(tmp_path / ".rft")) == "rft"

    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "rft").touch()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert rft_command(Home(tmp_path / ".rft")) == ".venv/bin/rft"


def test_a_command_is_repeated_with_the_options_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"rounds": 2, "seed": 0, "engine": None, "detach_engines": False, "json": Path("my results.json")}
    home = Home(tmp_path / ".rft")
    rft = rft_command(home)
    assert rft_command_with(home, "demo", **given) == f"{rft} demo --rounds 2 --seed 0 --json 'my results.json'"
    assert rft_command_with(home, "run", detach_engines=True) == f"{rft} run --detach-engines"


def test_the_weights_are_named_with_how_to_use_them(home: Home, write_config) -> None:
    start.write_config(home, load_config(write_config()))
    console = Console(file=io.StringIO(), width=80)

    print_next_steps(Project.open(home), console, "models:/sums-one/2", "/data/global_step_8")

    text = console.file.getvalue()
    assert "trace models:/sums-one/2" in text
    assert "AutoModelForCausalLM.from_pretrained('/data/global_step_8')" in text
    assert "vllm serve /data/global_step_8" in text
