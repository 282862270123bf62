"""Check the parameter names of user functions, and select the arguments that a function declares."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

_UNNAMED = inspect.Parameter.POSITIONAL_ONLY
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_parameters(
    function: Callable[..., Any],
    what: str,
    required: Collection[str],
    optional: Collection[str],
    extra: Collection[str] = (),
) -> None:
    """Raise ``ValueError`` unless ``function`` has every required parameter and only allowed ones.

    ``extra``: names of further arguments that will be passed, so the function must declare them too.
    """
    parameters = inspect.signature(function).parameters.values()
    variadic = [str(parameter) for parameter in parameters if parameter.kind in _VARIADIC]
    names = [parameter.name for parameter in parameters if parameter.kind not in (*_VARIADIC, _UNNAMED)]
    unnamed = [parameter.name for parameter in parameters if parameter.kind is _UNNAMED]
    missing = [name for name in required if name not in names]
    disallowed = [name for name in names if name not in (*required, *optional, *extra)]
    unknown = [name for name in extra if name not in names]
    problems = [
        f"Should not use *args or **kwargs: {variadic}" if variadic else "",
        f"Should not have positional-only parameters: {unnamed}" if unnamed else "",
        f"Missing essential parameters: {missing}" if missing else "",
        f"Contains disallowed parameters: {disallowed}" if disallowed else "",
        f"Has no parameters for the given arguments: {unknown}" if unknown else "",
    ]
    if any(problems):
        name = getattr(function, "__name__", type(function).__name__)
        allowed = f"required: {list(required)}, optional: {list(optional)}"
        raise ValueError(f"{what} validation failed for '{name}': {'; '.join(filter(None, problems))} ({allowed})")


def accepted_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The ``arguments`` for which ``function`` has a parameter."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}
