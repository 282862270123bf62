"""The tutorial, read and done: its files are written, its commands run in order, and the model gets better.

The Chinese page has the same steps.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from interface import Workplace, running_ui

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
CHINESE = TUTORIAL.with_name("tutorial.zh.md")
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Reader(Workplace):
    """Somebody who works through the tutorial in a folder, with the platform's environment activated."""

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "RFT_HOME"}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        return {**kept, "PATH": programs, "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "rft_platform", *arguments]

    def shell(self, script: str) -> str:
        """What a block of commands prints."""
        done = subprocess.run(
            ["bash", "-euc", script], cwd=self.cwd, env=self.environment, capture_output=True, text=True, timeout=1000
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def look(self) -> None:
        """``rft ui``, up to its pages."""
        with running_ui(self) as ui:
            for page in (ui.url, ui.mlflow_url):
                answer = httpx.get(f"{page}?token={ui.token}", timeout=60, follow_redirects=True)
                assert answer.status_code == 200 and "<html" in answer.text


def test_the_tutorial(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    reader = Reader(folder)
    printed: dict[str, str] = {}
    blocks = BLOCK.findall(TUTORIAL.read_text(encoding="utf-8"))
    assert BLOCK.findall(CHINESE.read_text(encoding="utf-8")) == blocks, "the Chinese page has other steps"
    for language, file, text in blocks:
        if file:
            (folder / file).write_text(text)
        elif text.strip() == "rft ui":
            reader.look()
        elif language == "bash":
            printed[text.strip()] = reader.shell(text)
        elif text.startswith("batches"):  # what the page shows of the dry run
            assert text in printed["rft run --config rft.yaml --dry-run"]

    start, *_, last = json.loads(reader.shell("rft rounds --json"))["rounds"]
    print(printed["rft rounds"])
    assert last["round"] == 3 and last["pass_rate_sampled"] >= start["pass_rate_sampled"] + 0.2
    assert "champion" in printed["rft rounds"]
    assert "warm start" in printed["rft trace models:/tutorial-largest@champion"]
    assert printed["python use.py"].strip() in ("4", "1", "7")

    moved = Reader(folder.rename(tmp_path / "there"))
    longer = "rft run --config rft.yaml --rounds 4"
    assert "rounds: 4" in moved.shell(f"{longer} --dry-run")
    moved.shell(longer)
    assert json.loads(moved.shell("rft rounds --json"))["rounds"][-1]["round"] == 4
