"""Checks of user functions whose parameters are matched by name."""

import inspect
from collections.abc import Callable
from typing import Any

WORKFLOW_REQUIRED = ("task", "model")
WORKFLOW_OPTIONAL = ("auxiliary_models", "logger")

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_workflow_function(function: Callable[..., Any]) -> None:
    """Raise ``ValueError`` unless the parameters are ``task``, ``model`` [, ``auxiliary_models``] [, ``logger``]."""
    check_parameters(function, WORKFLOW_REQUIRED, WORKFLOW_OPTIONAL, "Workflow function")


def check_parameters(
    function: Callable[..., Any], required: tuple[str, ...], optional: tuple[str, ...], what: str
) -> None:
    """Raise ``ValueError`` unless ``function`` has every required parameter and none beyond the optional ones."""
    parameters = inspect.signature(function).parameters.values()
    name = getattr(function, "__name__", type(function).__name__)
    variadic = [str(parameter) for parameter in parameters if parameter.kind in _VARIADIC]
    names = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
    missing = [wanted for wanted in required if wanted not in names]
    disallowed = [found for found in names if found not in (*required, *optional)]
    problems = [
        f"Should not use *args or **kwargs: {variadic}" if variadic else "",
        f"Missing essential parameters: {missing}" if missing else "",
        f"Contains disallowed parameters: {disallowed}" if disallowed else "",
    ]
    if any(problems):
        allowed = f"required: {list(required)}, optional: {list(optional)}"
        raise ValueError(f"{what} validation failed for '{name}': {'; '.join(filter(None, problems))} ({allowed})")


def accepted_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that ``function`` has a parameter for."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
