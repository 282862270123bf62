"""Workflows by name, and the check of their parameters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.rollout.runner.run_rollouts import SingleTurn
from rft_platform.rollout.runs.attempt import call_workflow
from rft_platform.rollout.workflow import check_workflow_function, resolve_workflow, takes_system_prompt
from rft_platform.rollout.workflows.calculator import CalculatorWorkflow
from rft_platform.rollout.workflows.chat_models import agentscope_version
from rft_platform.tasks.task import Task

from . import samples

HERE = samples.__name__


def test_built_in_workflows() -> None:
    assert resolve_workflow("single_turn", {}, "be brief") == SingleTurn("be brief")
    assert resolve_workflow("single_turn") == SingleTurn()
    assert resolve_workflow("calculator", {"max_turns": 2}) == CalculatorWorkflow(max_turns=2)


def test_user_workflows() -> None:
    assert resolve_workflow(f"{HERE}:ask_once", system_prompt="not for functions") is samples.ask_once
    custom = resolve_workflow(f"{HERE}:Custom", {"turns": 3}, "be brief")
    assert isinstance(custom, samples.Custom)
    assert (custom.turns, custom.system_prompt) == (3, "be brief")


async def test_a_function_with_the_parameter_gets_the_system_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompted.py"
    file.write_text("async def agent(task, model, system_prompt):\n    return system_prompt\n")
    task = Task("t", "tasks", "Hello?", None, {"question": "Hello?"})
    for prompt in ("be brief", None):
        workflow = resolve_workflow(f"{file}:agent", system_prompt=prompt)
        model: Any = SimpleNamespace()
        assert await call_workflow(workflow, task, model, None) == prompt
    given = [f"{file}:agent", f"{HERE}:Custom", "single_turn", "frozen_lake", f"{HERE}:ask_once", "tool_call"]
    assert [takes_system_prompt(name) for name in given] == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("singel_turn", {}, "expected one of .*calculator, dialogue, .*single_turn"),
        ("no.such.module:f", {}, "cannot import no.such.module"),
        (f"{HERE}:nothing", {}, "has no 'nothing'"),
        (f"{HERE}:NOT_CALLABLE", {}, "expected a function"),
        (f"{HERE}:misspelt", {}, r"Missing essential parameters: \['model'\]"),
        (f"{HERE}:ask_once", {"turns": 1}, "only a class can take them"),
        (f"{HERE}:Custom", {"turn": 1}, r"workflow_args \['turn'\] do not fit"),
        (f"{HERE}:Custom", {"turns": None}, r"Custom': its constructor raised TypeError: .*\(.*samples.py:\d+\)"),
    ],
)
def test_the_error_of_a_bad_name_names_the_cause(name: str, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_workflow(name, arguments)


def test_a_folder_named_agentscope_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agentscope").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert agentscope_version.__wrapped__() is None


def test_parameters_are_checked_by_name() -> None:
    async def good(model, logger, task, auxiliary_models=None): ...  # type: ignore[no-untyped-def]
    async def variadic(task, model, **rest): ...  # type: ignore[no-untyped-def]
    async def extra(task, model, temperature=1.0): ...  # type: ignore[no-untyped-def]

    check_workflow_function(good)
    with pytest.raises(ValueError, match=r"\*args or \*\*kwargs"):
        check_workflow_function(variadic)
    with pytest.raises(ValueError, match=r"Contains disallowed parameters: \['temperature'\]"):
        check_workflow_function(extra)
