"""Judges by name: those that come with the platform, and any importable function."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from rft_platform.errors import UserError
from rft_platform.judging.rules.matching import contains, exact_match, matches_format, within_length
from rft_platform.judging.rules.mathematics import math
from rft_platform.judging.rules.numbers import gsm8k, numeric
from rft_platform.judging.types import JudgeFunction
from rft_platform.user_code import load_object

RULES: Mapping[str, JudgeFunction] = MappingProxyType(
    {
        "exact_match": exact_match,
        "numeric": numeric,
        "gsm8k": gsm8k,
        "math": math,
        "contains": contains,
        "format": matches_format,
        "length": within_length,
    }
)


def find_judge(name: str) -> JudgeFunction:
    """The rule called ``name``, or the function that a reference (``module:function``) names. Raises ``UserError``."""
    if name in RULES:
        return RULES[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, RULES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown judge {name!r}: {hint}Known are {', '.join(RULES)}, or give package.module:function")
    function: JudgeFunction = load_object(name, "judge")
    if not callable(function):
        raise UserError(f"judge {name!r}: expected a function, got a {type(function).__name__}")
    return function
