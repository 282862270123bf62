"""User functions by name where they have one, in memory where not."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rft_platform.cli.commands.tune import _auxiliaries
from rft_platform.cli.main import app
from rft_platform.common.errors import UserError
from rft_platform.common.user_code import is_live, load_object, reference_of, short_name
from rft_platform.judging.execution.compose import build_judge
from rft_platform.rollout.workflow import resolve_workflow
from rft_platform.tuner import translation, tune


async def workflow(task, model):  # type: ignore[no-untyped-def]
    return task


async def judge(task, response):  # type: ignore[no-untyped-def]
    return 1.0


def test_functions_of_a_module_are_found_by_name() -> None:
    tuned = translation.tuned_functions(workflow, judge)
    assert resolve_workflow(tuned.workflow) is workflow
    assert tuned.judge is not None and load_object(tuned.judge, "judge") is judge
    assert tuned.notice is None


def test_a_lambda_lives_in_this_process_alone() -> None:
    tuned = translation.tuned_functions(lambda task, model: None, lambda task, response: 0.5)
    assert tuned.judge is not None and is_live(tuned.workflow) and is_live(tuned.judge)
    assert callable(resolve_workflow(tuned.workflow))
    assert build_judge(tuned.judge).parts[0].function(task={}, response="") == 0.5
    assert tuned.notice is not None and "cannot be resumed or judged again from the UI" in tuned.notice
    program = f"from rft_platform.rollout.workflow import resolve_workflow; resolve_workflow({tuned.workflow!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "existed only in the process that trained" in done.stderr


def test_a_decorated_function_is_not_confused_with_the_one_below(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(task, model):  # type: ignore[no-untyped-def]
        return None

    hidden.__qualname__, hidden.__module__ = "workflow", __name__  # as functools.wraps leaves it
    assert is_live(translation.tuned_functions(hidden, None).workflow)


def test_a_function_of_a_loaded_file_is_named_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def solve(task, model): ...\n")
    function = load_object(f"{file}:solve", "workflow")
    assert reference_of(function) == f"{file}:solve"
    assert short_name(f"{file}:solve") == "mine:solve"


def test_a_script_that_tunes_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "unguarded.py"
    file.write_text(
        "from rft_platform.tuner import tune\ndef solve(task, model): ...\ntune(workflow_func=solve, config_path='x')\n"
    )
    with pytest.raises(UserError, match=r'put the call below `if __name__ == "__main__":`'):
        load_object(f"{file}:solve", "workflow")


def test_tune_refuses_wrong_functions_before_anything_else() -> None:
    with pytest.raises(ValueError, match=r"Missing essential parameters: \['model'\]"):
        tune(workflow_func=lambda task: None)
    with pytest.raises(ValueError, match=r"Contains disallowed parameters: \['answer'\]"):
        tune(workflow_func=workflow, judge_func=lambda task, response, answer: 0.0)
    with pytest.raises(ValueError, match="expected a function of task and model"):
        tune(workflow_func="workflow")  # type: ignore[arg-type]


def test_auxiliary_models_from_the_shell() -> None:
    (name, model), *_ = (_auxiliaries(["critic=owner/judge", "b=c"], 512) or {}).items()
    assert (name, model.model_path, model.max_model_len) == ("critic", "owner/judge", 512)
    assert _auxiliaries(None, 512) is None
    for given, length, said in (
        ("critic", 512, "expected NAME=MODEL"),
        ("critic=http://x/v1", 512, "explorer.auxiliary_models: .*base_url: http://x/v1"),
        ("critic=owner/judge", None, "also give --max-model-len"),
    ):
        with pytest.raises(UserError, match=said):
            _auxiliaries([given], length)


@pytest.mark.parametrize(("options", "written"), [([], {"path"}), (["--split", "test"], {"path", "split"})])
def test_a_split_that_the_command_line_leaves_out_is_that_of_the_file(
    monkeypatch: pytest.MonkeyPatch, options: list[str], written: set[str]
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("rft_platform.tuner.tune", lambda **arguments: given.update(arguments))
    done = CliRunner().invoke(app, ["tune", f"{__file__}:workflow", "--dataset", "data", *options])
    assert done.exit_code == 0, done.output
    assert given["train_dataset"].model_fields_set == written


@pytest.mark.parametrize(
    ("options", "subset"),
    [
        (["--eval-dataset", "data", "--subset", "main"], "main"),
        (["--eval-dataset", "data", "--subset", "main", "--eval-subset", "hard"], "hard"),
        (["--eval-dataset", "other", "--subset", "main"], None),
        (["--eval-dataset", "other", "--eval-subset", "hard"], "hard"),
    ],
)
def test_the_subset_of_the_evaluation_is_that_of_the_same_dataset_or_its_own(
    monkeypatch: pytest.MonkeyPatch, options: list[str], subset: str | None
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("rft_platform.tuner.tune", lambda **arguments: given.update(arguments))
    done = CliRunner().invoke(app, ["tune", f"{__file__}:workflow", "--dataset", "data", *options])
    assert done.exit_code == 0, done.output
    assert (given["eval_dataset"].name, given["eval_dataset"].split) == (subset, "test")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dataset", "data", "--eval-subset", "hard"], "--eval-subset needs --eval-dataset"),
        (["--dataset", "data", "--eval-split", "train"], "--eval-split needs --eval-dataset"),
        (["--split", "train[:10]"], "--split needs --dataset"),
    ],
)
def test_a_setting_of_a_dataset_without_the_dataset_is_refused(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["tune", f"{__file__}:workflow", *options])
    assert done.exit_code == 2
    assert f"{said}: give both" in done.stderr
