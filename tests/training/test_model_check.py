"""The check of a run's models fails in one line, whatever happens to the process that builds them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.common.errors import RftError
from rft_platform.driver import model_check
from rft_platform.driver.model_check import ModelCheck

PROGRAMS = {
    "nonsense": "print('Loading weights: 100%')",
    "too_few": "print('[]')",
    "no_text": "print('[7]')",
    "dies": "import os; os.kill(os.getpid(), 9)",
    "fails": "import sys; sys.exit('no space left on the disk')",
    "hangs": "import time; time.sleep(600)",
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
        (tmp_path / f"check_that_{program}.py").write_text(PROGRAMS[program])
        monkeypatch.setattr(model_check, "_PROGRAM", f"check_that_{program}")
        return ModelCheck({"model.model_path": folder}, 64)

    return started


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("nonsense", "the check of the models failed: it answered 'Loading weights: 100%'"),
        ("too_few", r"the check of the models failed: it answered '\[\]'"),
        ("no_text", r"the check of the models failed: it answered '\[7\]'"),
        ("dies", "the check of the models failed: it was ended by signal 9"),
        ("fails", "the check of the models failed: no space left on the disk"),
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
    running.stop()
    assert running._process is not None
    assert running._process.returncode is not None


def test_a_failed_check_is_not_remembered(check) -> None:
    for _ in range(2):
        running = check("too_few")
        with pytest.raises(RftError):
            list(running.problems())
        running.stop()
