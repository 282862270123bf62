"""Judges by name: built-in ones, and any importable function."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object
from rft_platform.judging.execution.agentscope_metrics import MetricJudge, is_metric
from rft_platform.judging.llm.comparing import PairwiseJudge
from rft_platform.judging.llm.scoring import GradingSettings, LlmJudge
from rft_platform.judging.rules.code import code
from rft_platform.judging.rules.countdown import countdown
from rft_platform.judging.rules.matching import contains, exact_match, matches_format, within_length
from rft_platform.judging.rules.mathematics import math
from rft_platform.judging.rules.numbers import gsm8k, numeric
from rft_platform.judging.rules.patterns import json_schema, regex, tags
from rft_platform.judging.rules.penalties import length_penalty, shortest, steps_penalty
from rft_platform.judging.rules.reasoning_gym import reasoning_gym
from rft_platform.judging.rules.tool_use import tool_use
from rft_platform.judging.types import GroupJudge, JudgeFunction

RULES: Mapping[str, JudgeFunction | GroupJudge] = MappingProxyType(
    {
        "exact_match": exact_match,
        "numeric": numeric,
        "gsm8k": gsm8k,
        "math": math,
        "countdown": countdown,
        "reasoning_gym": reasoning_gym,
        "contains": contains,
        "regex": regex,
        "json_schema": json_schema,
        "format": matches_format,
        "tags": tags,
        "length": within_length,
        "length_penalty": length_penalty,
        "steps_penalty": steps_penalty,
        "tool_use": tool_use,
        "code": code,
        "shortest": shortest,
    }
)

#: Judge classes, instantiated with their arguments.
MODEL_JUDGES: Mapping[str, type[GradingSettings]] = MappingProxyType({"llm": LlmJudge, "pairwise": PairwiseJudge})


def find_judge(name: str) -> JudgeFunction | GroupJudge:
    """Return the built-in rule ``name``, or the function if ``name`` is a reference (``module:function``).

    Raises ``UserError`` for an unknown name and for a reference to something that is not a function.
    """
    if name in RULES:
        return RULES[name]
    if ":" not in name and not name.endswith(".py"):
        known = (*RULES, *MODEL_JUDGES)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise UserError(
            f"unknown judge {name!r}: {hint} are {', '.join(known)}, or give package.module:function "
            "or file.py:function"
        )
    function: JudgeFunction | GroupJudge = load_object(name, "judge")
    if not callable(function):
        raise UserError(f"judge {name!r}: expected a function, got a {type(function).__name__}")
    if is_metric(function):
        return MetricJudge(function)
    return function
