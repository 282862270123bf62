"""What a judge is: a function from a task and a response to a reward."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(slots=True)
class JudgeOutput:
    """The judgement of one run: a scalar reward and named parts or metrics beside it."""

    reward: float
    metrics: dict[str, float] | None = None


#: ``judge(task: dict, response: Any, ...) -> JudgeOutput | float``; parameters are matched by name; sync or async.
JudgeFunction = Callable[..., JudgeOutput | float | Awaitable[JudgeOutput | float]]
