"""The check of a run's models fails in one line, whatever happens to the process that builds them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rft_platform.common.errors import RftError
from rft_platform.run import model_check
from rft_platform.run.model_check import ModelCheck

PROGRAMS = {
    "dies": "import os; os.kill(os.getpid(), 9)",
    "fails": "raise OSError('no space left on the disk')",
    "hangs": "import time; time.sleep(600)",
    "prints": "print('Loading weights: 100%'); return ['it is too small']",
}


@pytest.fixture
def check(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModelCheck]:
    """Check the tiny model with one of ``PROGRAMS`` in place of the real one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)

    def started(program: str) -> ModelCheck:
        (tmp_path / f"check_that_{program}.py").write_text(f"def problems(folders, longest, lora): {PROGRAMS[program]}")
        monkeypatch.setattr(model_check, "_PROGRAM", f"check_that_{program}")
        return ModelCheck({"model.model_path": folder}, 64)

    return started


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("dies", "the check of the models failed: problems in .*: it was killed by SIGKILL"),
        ("fails", "the check of the models failed: OSError: no space left on the disk"),
    ],
)
def test_a_process_that_fails_is_one_line(check, program: str, message: str) -> None:
    running = check(program)
    with pytest.raises(RftError, match=message) as raised:
        list(running.problems())
    assert len(str(raised.value).splitlines()) == 1
    running.stop()


def test_a_process_that_hangs_is_ended(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "_LIMIT_S", 0.5)
    running = check("hangs")
    with pytest.raises(RftError, match=r"model: building the model to check it took more than 0 s|more than 1 s"):
        list(running.problems())
    assert running._child is not None and not psutil.pid_exists(running._child.pid)


def test_output_of_libraries_does_not_disturb_the_answer(check) -> None:
    running = check("prints")
    assert list(running.problems()) == ["model.model_path: it is too small"]
    running.stop()


def test_a_failed_check_is_not_remembered(check) -> None:
    for _ in range(2):
        running = check("fails")
        with pytest.raises(RftError):
            list(running.problems())
        running.stop()
