"""AgentScope's metrics (``agentscope.evaluate.MetricBase``) as judges. Importing this does not need AgentScope.

A metric is called with the arguments that it declares: ``task`` (the dataset's row), ``response``, or a ``solution``
as AgentScope defines it. A metric object judges all tasks. A metric class is instantiated for each task; its
constructor gets ``task`` or the columns that it declares, as in ``CheckEqual(ground_truth)``.
"""

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_json
from rft_platform.common.user_code import accepted_arguments
from rft_platform.judging.execution.judge_version import used_source
from rft_platform.judging.types import JudgeOutput

_RESPONSE_NAMES = ("response", "output", "answer", "prediction")
_WORTH = {
    **dict.fromkeys(("pass", "passed", "true", "correct", "right", "yes", "success"), 1.0),
    **dict.fromkeys(("fail", "failed", "false", "incorrect", "wrong", "no", "failure"), 0.0),
}


def is_metric(value: Any) -> bool:
    """Whether ``value`` is an AgentScope metric: a metric object or a metric class."""
    if isinstance(value, type):
        return any(base.__name__ == "MetricBase" for base in value.__mro__) and callable(value)
    return callable(value) and hasattr(value, "metric_type") and isinstance(getattr(value, "name", None), str)


class MetricJudge:
    """A judge whose reward is the result of a metric; the numbers in the result's metadata become metrics."""

    __slots__ = ("__dict__", "_metric")  # __dict__ is part of the judge's version: plain values only

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.__name__ = metric.__name__ if isinstance(metric, type) else metric.name
        self.__dict__["source"] = digest_json(used_source(metric))

    async def __call__(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        """Return the reward of one run. Raises ValueError if the result is neither a number nor a known category."""
        metric = _made_for(self._metric, task) if isinstance(self._metric, type) else self._metric
        result = metric(**_arguments(metric, task, response))
        if inspect.isawaitable(result):
            result = await result
        metadata = getattr(result, "metadata", None) or {}
        numbers = {name: float(value) for name, value in metadata.items() if isinstance(value, int | float)}
        return JudgeOutput(_reward(self.__name__, getattr(result, "result", result)), numbers or None)


def _made_for(metric: type, task: dict[str, Any]) -> Any:
    try:
        return metric(**accepted_arguments(metric, {**task, "task": task}))
    except TypeError as error:
        raise UserError(
            f"metric {metric.__name__}: its constructor gets the task's columns ({', '.join(task)}) and task by name, "
            f"and {error}"
        ) from error


def _arguments(metric: Any, task: dict[str, Any], response: Any) -> dict[str, Any]:
    offered = {"task": task, **dict.fromkeys(_RESPONSE_NAMES, response)}
    parameters = inspect.signature(metric).parameters.values()
    arguments = accepted_arguments(metric, offered)
    for parameter in parameters:  # AgentScope's own metrics take a solution
        if parameter.name not in arguments and parameter.default is parameter.empty:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            arguments[parameter.name] = _solution(response)
    return arguments


def _solution(response: Any) -> Any:
    fields = {"success": True, "output": response, "trajectory": []}
    try:
        return importlib.import_module("agentscope.evaluate").SolutionOutput(**fields)
    except ImportError:
        return SimpleNamespace(**fields)


def _reward(name: str, result: Any) -> float:
    if isinstance(result, str):
        worth = _WORTH.get(result.strip().lower())
        if worth is not None:
            return worth
    try:
        return float(result)
    except (TypeError, ValueError):
        raise ValueError(
            f"metric {name}: its result {result!r} is neither a number nor a category such as pass or fail; write a "
            "judge function that turns it into a reward"
        ) from None
