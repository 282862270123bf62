"""Operators by name: built-in, from plugins, or any importable function."""

from collections.abc import Callable, Mapping
from typing import Any

from rft_platform.algorithms.common.registry import Registry, check_arguments
from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object
from rft_platform.judging.operators.experiences import Change, Experiences

OperatorFunction = Callable[..., Change]
"""``(experiences: Experiences, *, options) -> Change``."""

OPERATORS: Registry[OperatorFunction] = Registry("experience operator", "rft_platform.judging.operators")


def operator(name: str) -> Callable[[OperatorFunction], OperatorFunction]:
    """Register the decorated function under ``name`` (``data_processor.experience_pipeline.operators``)."""

    def decorate(function: OperatorFunction) -> OperatorFunction:
        OPERATORS.add(name, function, function)
        return function

    return decorate


def find_operator(name: str, args: Mapping[str, Any]) -> OperatorFunction:
    """Return the operator ``name``, or the function if ``name`` is a reference (``module:function``).

    Raises UserError for an unknown name, an unknown option, or an option value that does not fit.
    """
    function: Any = load_object(name, "experience operator") if ":" in name else OPERATORS.get(name)
    if not callable(function):
        raise UserError(f"experience operator {name!r}: expected a function, got a {type(function).__name__}")
    check_arguments(f"experience operator {name!r}", function, args)
    return function


__all__ = ["OPERATORS", "Change", "Experiences", "OperatorFunction", "find_operator", "operator"]
