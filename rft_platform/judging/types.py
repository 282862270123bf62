"""What a judge is: a function from a task and a response to a reward."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from rft_platform.signature import check_parameters


@dataclass(slots=True)
class JudgeOutput:
    """The judgement of one run: a scalar reward and named parts or metrics beside it."""

    reward: float
    metrics: dict[str, float] | None = None


#: ``judge(task: dict, response: Any, ...) -> JudgeOutput | float``; parameters are matched by name; sync or async.
JudgeFunction = Callable[..., JudgeOutput | float | Awaitable[JudgeOutput | float]]


def check_judge_function(function: Callable[..., Any], extra: Collection[str] = ()) -> None:
    """Raise ``ValueError`` unless the parameters are ``task``, ``response`` [, ``auxiliary_models``] [, ``logger``].

    ``extra`` are the names of further arguments that will be given.
    """
    check_parameters(function, "Judge function", ("task", "response"), ("auxiliary_models", "logger"), extra)
