"""Judge types: functions from a task and a response, or from a task and a group's responses, to rewards.

``RunJudgement`` is the judgement of one run; ``refuse_beyond`` limits its reward.
"""

import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.common.user_code import check_parameters

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunJudgement:
    """The judgement of one run: a reward and its parts, or the error that prevented it."""

    run_id: str
    task_id: str
    reward: float  # NaN if ``error`` is set
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)  # by policy, for policies with another reward

    def of_policy(self, policy: str) -> "RunJudgement":
        """Return the judgement with the reward of one policy."""
        return self if policy == DEFAULT_POLICY else replace(self, reward=self.rewards.get(policy, self.reward))


def refuse_beyond(runs: list[RunJudgement], most: float | None) -> tuple[list[RunJudgement], str | None]:
    """Return the judgements; a judgement whose reward is further from 0 than ``most`` becomes a failed one.

    The second value tells the first such error if no run has a usable reward left, else None.
    """
    if most is None:
        return runs, None
    checked = [_within(run, most) for run in runs]
    refused = [new for new, old in zip(checked, runs, strict=True) if new is not old]
    if not refused:
        return runs, None
    first = f"run {refused[0].run_id} (task {refused[0].task_id}): {refused[0].error}"
    if all(run.error is not None for run in checked):
        return checked, f"no run has a usable reward; the first invalid one: {first}"
    _log.warning(
        "the rewards of %d of %d runs are invalid; these runs are excluded; the first: %s",
        len(refused),
        len(runs),
        first,
    )
    return checked, None


def _within(run: RunJudgement, most: float) -> RunJudgement:
    for reward in (run.reward, *run.rewards.values()):
        if run.error is None and abs(reward) > most:
            error = (
                f"the reward is {reward:g}, beyond {most:g}: scale the rewards, or set max_abs_reward of the taskset "
                "(null: no limit)"
            )
            return RunJudgement(run.run_id, run.task_id, math.nan, error=error)
    return run


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
