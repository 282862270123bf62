"""Judge types: functions from a task and a response, or from a task and a group's responses, to rewards."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from rft_platform.common.call_signature import check_parameters


@dataclass(slots=True)
class JudgeOutput:
    """The judgement of one run: a reward, and optionally named parts or metrics.

    ``rewards`` is for runs with several trainable policies: it maps names of section ``policies`` to rewards.
    ``reward`` goes to the first policy, and to every policy that ``rewards`` does not name.
    """

    reward: float
    metrics: dict[str, float] | None = None
    rewards: dict[str, float] | None = None


#: ``judge(task: dict, response: Any, ...) -> JudgeOutput | float``; parameters are matched by name; sync or async.
JudgeFunction = Callable[..., JudgeOutput | float | Awaitable[JudgeOutput | float]]

#: ``judge(task: dict, responses: list, ...)`` gives one reward for each run of a group, in their order.
GroupJudge = Callable[..., Sequence[JudgeOutput | float] | Awaitable[Sequence[JudgeOutput | float]]]

_OPTIONAL = ("auxiliary_models", "logger")


def check_judge_function(function: Callable[..., Any], extra: Collection[str] = (), *, run: bool = False) -> None:
    """Raise ``ValueError`` unless the parameters are ``task``, ``response`` [, ``auxiliary_models``] [, ``logger``].

    ``extra`` are the names of further arguments that will be passed. With ``run`` (for judges that a configuration
    names) the function may also take ``run``, the ``JudgedRun``.
    """
    optional = (*_OPTIONAL, "run") if run else _OPTIONAL
    check_parameters(function, "Judge function", ("task", "response"), optional, extra)


def check_group_judge(function: Callable[..., Any], extra: Collection[str] = ()) -> None:
    """Raise ``ValueError`` unless the parameters are ``task``, ``responses`` [, ``runs``] and those of any judge."""
    check_parameters(function, "Group judge function", ("task", "responses"), (*_OPTIONAL, "runs"), extra)


def is_group_judge(function: Callable[..., Any]) -> bool:
    """Whether a function judges all runs of a group at once: it has a parameter ``responses``."""
    return "responses" in inspect.signature(function).parameters


def declared_responses(function: Callable[..., Any]) -> set[type]:
    """Classes in the annotation of a judge's parameter ``response`` or ``responses``.

    Empty if there is no annotation, or if the annotation cannot be evaluated.
    """
    parameters = inspect.signature(function).parameters
    annotation = next((parameters[name].annotation for name in ("response", "responses") if name in parameters), None)
    while isinstance(function, functools.partial):
        function = function.func
    plain = function if hasattr(function, "__globals__") else getattr(type(function), "__call__", function)  # noqa: B004
    scope = getattr(inspect.unwrap(plain), "__globals__", {})
    try:
        hints = get_type_hints(SimpleNamespace(__annotations__={"response": annotation}), scope)
    except Exception:  # a name that only type checkers see, for example
        return set()
    return set(_classes_in(hints["response"]))


def _classes_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes_in(argument)
