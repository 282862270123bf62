"""What parameters a judge may have: they are matched by name."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

REQUIRED = ("task", "response")
OPTIONAL = ("auxiliary_models", "logger")

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_judge_function(function: Callable[..., Any], extra: Collection[str] = ()) -> None:
    """Raise ``ValueError`` unless the parameters are ``task``, ``response`` [, ``auxiliary_models``] [, ``logger``].

    ``extra`` are the names of further arguments that will be given.
    """
    parameters = inspect.signature(function).parameters.values()
    variadic = [str(parameter) for parameter in parameters if parameter.kind in _VARIADIC]
    names = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
    missing = [name for name in REQUIRED if name not in names]
    disallowed = [name for name in names if name not in (*REQUIRED, *OPTIONAL, *extra)]
    unknown = [name for name in extra if name not in names]
    problems = [
        f"Should not use *args or **kwargs: {variadic}" if variadic else "",
        f"Missing essential parameters: {missing}" if missing else "",
        f"Contains disallowed parameters: {disallowed}" if disallowed else "",
        f"Has no parameters for the given arguments: {unknown}" if unknown else "",
    ]
    if any(problems):
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"Judge function validation failed for '{name}': {'; '.join(filter(None, problems))}")


def optional_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that the function has a parameter for."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
