"""Workflows by name, and the check of their parameters."""

import pytest

from rft_platform.common.errors import UserError
from rft_platform.rollout.runner.run_rollouts import SingleTurn
from rft_platform.rollout.workflow import check_workflow_function, resolve_workflow
from rft_platform.rollout.workflows.calculator import CalculatorWorkflow

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
    ],
)
def test_the_error_of_a_bad_name_names_the_cause(name: str, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_workflow(name, arguments)


def test_parameters_are_checked_by_name() -> None:
    async def good(model, logger, task, auxiliary_models=None): ...  # type: ignore[no-untyped-def]
    async def variadic(task, model, **rest): ...  # type: ignore[no-untyped-def]
    async def extra(task, model, temperature=1.0): ...  # type: ignore[no-untyped-def]

    check_workflow_function(good)
    with pytest.raises(ValueError, match=r"\*args or \*\*kwargs"):
        check_workflow_function(variadic)
    with pytest.raises(ValueError, match=r"Contains disallowed parameters: \['temperature'\]"):
        check_workflow_function(extra)
