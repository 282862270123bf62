"""Build a judge from its configuration: one function, or a weighted sum of several.

A name in the configuration is a built-in judge or any importable function.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from rft_platform.algorithms.common.registry import check_arguments
from rft_platform.common.errors import UserError
from rft_platform.common.user_code import is_live, load_object, short_name
from rft_platform.config.schema.buffer import WeightedJudge
from rft_platform.judging.execution.agentscope_metrics import MetricJudge, is_metric
from rft_platform.judging.execution.judge_version import judge_version
from rft_platform.judging.judge_context import JudgeState
from rft_platform.judging.llm.judges import GradingSettings, LlmJudge, PairwiseJudge
from rft_platform.judging.llm.ranking import RankingJudge
from rft_platform.judging.rules.code import code
from rft_platform.judging.rules.mathematics import gsm8k, math, numeric
from rft_platform.judging.rules.patterns import (
    contains,
    exact_match,
    json_schema,
    matches_format,
    regex,
    tags,
    within_length,
)
from rft_platform.judging.rules.penalties import length_penalty, shortest, steps_penalty
from rft_platform.judging.rules.puzzles import countdown, reasoning_gym
from rft_platform.judging.rules.tool_use import tool_use
from rft_platform.judging.types import (
    GroupJudge,
    JudgeFunction,
    check_group_judge,
    check_judge_function,
    is_group_judge,
)

if TYPE_CHECKING:
    from rft_platform.judging.execution.judge_executor import RunToJudge, Verdict

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
MODEL_JUDGES: Mapping[str, type[GradingSettings]] = MappingProxyType(
    {"llm": LlmJudge, "pairwise": PairwiseJudge, "ranking": RankingJudge}
)


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


@dataclass(frozen=True, slots=True)
class JudgePart:
    """One function of a judge, with its bound arguments."""

    name: str  # name of this function's part of the reward
    function: JudgeFunction | GroupJudge
    args: Mapping[str, Any]
    weight: float = 1.0
    group: bool = False  # whether it judges all runs of a group at once
    builtin: bool = False  # whether it comes with the platform
    settings: Mapping[str, Any] | None = None  # only for a judge class: settings that its rewards depend on
    reference: str | None = None  # of a user's function that other processes can load

    @property
    def version(self) -> str:
        """A digest of everything that this part's rewards depend on."""
        return judge_version([(self.name, self.function, self.described, self.weight)])

    @property
    def described(self) -> dict[str, Any]:
        """What the judge's version contains of this part, besides name, weight and source code."""
        return dict(self.args if self.settings is None else self.settings)


@dataclass(frozen=True, slots=True)
class JudgeSpec:
    """A judge ready to run: reward = sum of weight * part."""

    parts: tuple[JudgePart, ...]
    version: str
    timeout_s: float | None = None  # limit of a user function for one run, or one group
    state: JudgeState | None = None  # where models' answers and their cost are stored; None: in RFT_HOME
    workers: "JudgeWorkers | None" = None  # where the user's functions run; None: in this process

    @property
    def name(self) -> str:
        """The names of the judge's parts, with their weights if there are several."""
        if len(self.parts) == 1:
            return self.parts[0].name
        return " + ".join(f"{part.weight:g} {part.name}" for part in self.parts)

    @property
    def asks_models(self) -> bool:
        """Whether auxiliary models may be called: an argument names one, or a function has ``auxiliary_models``."""
        return any(
            isinstance(getattr(part.function, "model", None), str)
            or "auxiliary_models" in inspect.signature(part.function).parameters
            for part in self.parts
        )


class PartCaller(Protocol):
    """Calls the user's functions of a judge in other processes."""

    async def judge(self, part: JudgePart, runs: Sequence["RunToJudge"]) -> list["Verdict"]:
        """The verdicts of one part on a run, or on the runs of a group; repeated elsewhere if the process is lost."""
        ...


class JudgeWorkers(Protocol):
    """Starts processes that call the user's functions of a judge."""

    def calling(
        self, judge: JudgeSpec, auxiliary_models: Mapping[str, Any], concurrency: int
    ) -> AbstractAsyncContextManager[PartCaller]:
        """What calls the parts of ``judge`` that have a reference, ``concurrency`` at a time."""
        ...


@dataclass(frozen=True, slots=True)
class JudgeInputs:
    """The columns of prompt and reference answer, and the models that the names of auxiliary models stand for."""

    answer: str | None = "answer"
    prompt: str | None = "question"
    models: Mapping[str, str] | None = None


def build_judge(
    judge: str | JudgeFunction | Sequence[WeightedJudge],
    args: Mapping[str, Any] | None = None,
    *,
    answer_key: str | None = "answer",
    prompt_key: str | None = "question",
    models: Mapping[str, str] | None = None,
) -> JudgeSpec:
    """Resolve names to functions, check parameters and compute the version.

    ``args`` are the arguments of a single judge; in a list each entry has its own. ``answer_key`` is the tasks' answer
    column for built-in rules that compare with a reference, ``prompt_key`` the question column for judges that show
    the question to a model. ``models`` maps names of auxiliary models to the models, which are part of the version;
    None: the models are not known here. Raises ``UserError`` for an unknown name, a function with the wrong parameters,
    and unknown or missing arguments.
    """
    inputs = JudgeInputs(answer_key, prompt_key, models)
    if isinstance(judge, str) or callable(judge):
        parts = [_part(judge, dict(args or {}), 1.0, inputs)]
    elif args:
        raise UserError(f"judge_args {dict(args)!r}: in a list of judges, give each entry its own args")
    elif not judge:
        raise UserError("judge: the list is empty; give at least one judge, or null if the workflow sets the reward")
    else:
        parts = [_part(entry.judge, dict(entry.args), entry.weight, inputs) for entry in judge]
    parts = _distinct(parts)
    version = judge_version([(part.name, part.function, part.described, part.weight) for part in parts])
    return JudgeSpec(tuple(parts), version)


def loaded_part(name: str, reference: str, args: Mapping[str, Any], weight: float) -> JudgePart:
    """The part of a judge that is a user's function, in another process. Raises UserError as ``build_judge`` does."""
    return replace(_part(reference, dict(args), weight, JudgeInputs()), name=name)


def _part(judge: str | JudgeFunction, args: dict[str, Any], weight: float, inputs: JudgeInputs) -> JudgePart:
    if isinstance(judge, str) and judge in MODEL_JUDGES:
        return _model_part(judge, args, weight, inputs)
    if isinstance(judge, str):
        name, function = short_name(judge), find_judge(judge)
    else:
        name, function = getattr(judge, "__name__", type(judge).__name__), judge
    builtin, group = function in RULES.values(), is_group_judge(function)
    reference = judge if isinstance(judge, str) and not builtin and not is_live(judge) else None
    if builtin:
        args = _rule_arguments(name, function, args, inputs.answer)
    else:
        try:
            check_group_judge(function, args) if group else check_judge_function(function, args, run=True)
        except ValueError as error:
            raise UserError(f"judge {name!r}: {error}") from error
    return JudgePart(name, function, args, weight, group, builtin, reference=reference)


def _model_part(name: str, args: dict[str, Any], weight: float, inputs: JudgeInputs) -> JudgePart:
    if "question_key" not in args:
        if inputs.prompt is None:
            raise UserError(
                f"judge {name!r} shows a model the question, but format.prompt_key is null: give question_key"
            )
        args = {**args, "question_key": inputs.prompt}
    try:
        function = MODEL_JUDGES[name](**args)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'args'}: {fault['msg']}" for fault in error.errors()
        )
        raise UserError(
            f"judge {name!r}: {problems} (its arguments: {', '.join(MODEL_JUDGES[name].model_fields)})"
        ) from error
    settings = function.identity()
    if isinstance(settings["model"], str) and inputs.models is not None:
        if settings["model"] not in inputs.models:
            raise UserError(
                f"judge {name!r}: model {settings['model']!r} is not among explorer.auxiliary_models "
                f"({', '.join(inputs.models) or 'none'}): add it there, or give {{base_url, model, api_key_env}}"
            )
        settings["model"] = inputs.models[settings["model"]]
    judge: Any = function
    return JudgePart(name, judge, {}, weight, is_group_judge(judge), builtin=True, settings=settings)


def _rule_arguments(
    name: str, rule: JudgeFunction | GroupJudge, args: dict[str, Any], answer_key: str | None
) -> dict[str, Any]:
    check_arguments(f"judge {name!r}", rule, args)
    if "answer_key" in inspect.signature(rule).parameters and "answer_key" not in args:
        if answer_key is None:
            raise UserError(f"judge {name!r} compares with a reference answer, but format.response_key is null")
        args = {**args, "answer_key": answer_key}
    return args


def _distinct(parts: list[JudgePart]) -> list[JudgePart]:
    """Make the names of the parts unique: the second ``numeric`` becomes ``numeric#2``."""
    seen: dict[str, int] = {}
    renamed = []
    for part in parts:
        seen[part.name] = count = seen.get(part.name, 0) + 1
        name = part.name if count == 1 else f"{part.name}#{count}"
        renamed.append(replace(part, name=name))
    return renamed
