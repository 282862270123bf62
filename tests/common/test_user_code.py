"""User functions by name, and back."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object, reference_of
from rft_platform.judging.execution.judge_version import judge_version

SCRIPT = """
from rft_platform.judging.execution.judge_version import judge_version
from rft_platform.common.user_code import load_object, reference_of
import neighbour

def judge(task, response):
    return neighbour.REWARD

if __name__ == "__main__":
    reference = reference_of(judge)
    assert load_object(reference, "judge") is judge
    print(reference)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "neighbour.py").write_text("REWARD = 0.5\n")
    (tmp_path / "main.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "main.py"


def test_a_function_of_a_script_is_found_by_another_process(script: Path) -> None:
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    reference = ran.stdout.strip()
    assert reference == f"{script}:judge"
    judge = load_object(reference, "judge")
    assert judge({}, "") == 0.5  # with the module beside it
    assert load_object(reference, "judge") is judge  # executed once


def test_a_function_of_a_module_is_named_by_it() -> None:
    assert reference_of(load_object) == "rft_platform.common.user_code:load_object"
    assert load_object("pathlib:Path.home", "workflow") == Path.home


def test_what_only_this_process_can_reach_is_refused() -> None:
    with pytest.raises(UserError, match="top level"):
        reference_of(lambda: None)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nonsense", "expected package.module:attribute"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("pathlib:Nothing", "pathlib has no 'Nothing'$"),
        ("pathlib:Pth", r"pathlib has no 'Pth'; did you mean Path\?"),
        ("pathlib:Path.exsts", r"pathlib has no 'Path.exsts'; did you mean exists\?"),
        (f"{Path(__file__).with_name('test_user_coed.py')}:f", r"no file .*; did you mean test_user_code.py\?"),
        ("/nowhere/agent.py", "names a file without a function; write /nowhere/agent.py:solve$"),
        (__file__, f"write {__file__}:script; the file defines script, test_a_function_of_a_script"),
        ("/nowhere/agent.py:f", "there is no file /nowhere/agent.py"),
    ],
)
def test_the_error_of_a_wrong_reference_names_the_cause(reference: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_object(reference, "workflow")


def test_a_file_that_raises_is_named_with_the_place(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1 / 0\n")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_object(f"{broken}:x", "judge")


JUDGE = """
class Scale:
    def __init__(self, factor):
        self.factor = factor


    def __call__(self, task, response):
        return self.factor.times * grown(len(response))


class Factor:
    times = 2


def grown(value):
    return value + 1


judge = Scale(Factor())


if __name__ == "__main__":
    from rft_platform.judging.execution.judge_version import judge_version

    print(judge_version([("judge", judge, {}, 1.0)]))
"""


def test_a_judge_of_a_script_has_one_version_whether_the_script_runs_or_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "scaled.py"
    file.write_text(JUDGE)
    loaded = judge_version([("judge", load_object(f"{file}:judge", "judge"), {}, 1.0)])
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == loaded


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from openai import NoSuchClient", r"cannot import .*; openai \d\S* is installed: does the code need another"),
        ("import openai.no_such_module", r"cannot import .*; openai \d\S* is installed: does the code need another"),
        (
            "import no_such_package",
            rf"\(No module named 'no_such_package'\); no_such_package is not installed in {re.escape(sys.executable)}: "
            r"install it there, or set explorer.workers.python .*; if it is a module of your own, .* on PYTHONPATH",
        ),
        ("import tests.no_such_module", r"cannot import .*; is it on PYTHONPATH\?"),
        (
            "from rft_platform.common.errors import UserError\nraise UserError('it needs another version')",
            r"workflow '\S+agent.py:f': it needs another version$",
        ),
    ],
)
def test_a_failed_import_names_the_installed_version_of_the_package(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "agent.py").write_text(code)
    with pytest.raises(UserError, match=message):
        load_object(f"{tmp_path / 'agent.py'}:f", "workflow")
