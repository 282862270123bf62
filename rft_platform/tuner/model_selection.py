"""``select_model()`` finds the model that solves a dataset's tasks best with a given workflow and judge."""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rft_platform.common.errors import UserCodeError
from rft_platform.common.fault_classification import described
from rft_platform.evaluation.prompt_search import FailureReward
from rft_platform.judging.types import check_judge_function
from rft_platform.rollout.workflow import check_workflow_function
from rft_platform.tuner.calls import call_function, tasks_of
from rft_platform.tuner.sections import DatasetConfig
from rft_platform.tuner.types import JudgeType, WorkflowType

_log = logging.getLogger(__name__)


async def select_model(
    *,
    workflow_func: WorkflowType,
    judge_func: JudgeType,
    train_dataset: DatasetConfig,
    candidate_models: Sequence[Any],
    max_threads: int = 2,
) -> tuple[Any, dict[str, float]]:
    """Return the candidate with the highest mean reward, with this mean as ``reward_avg`` and those of its metrics.

    The metrics are those of the judge; the mean of each is ``<name>_avg`` and includes only tasks that have the metric.
    The mean rewards of all candidates are printed; the first of equally good ones is returned.

    The functions are those of ``tune()``; ``auxiliary_models`` is empty. At most ``max_threads`` tasks run at once.
    Nothing is trained, and every candidate must be a model object whose service is already running: an AgentScope chat
    model, an ``AuxiliaryModel``, or another object with a name that the workflow can call. The judge gets a
    ``response`` with the workflow's ``response`` and ``metrics``, to which ``execution_time`` in seconds is added, as
    in AgentScope. At most ``total_steps`` tasks are used. A task that fails with a candidate, or whose reward is not
    finite, counts 0, or as much as the worst reward of all candidates if that is negative.

    Raises ValueError for fewer than two candidates, a candidate that is not a model or ``max_threads`` below 1,
    UserCodeError if a candidate fails on every task.
    """
    from rft_platform.rollout.workflows.chat_models import framework_models
    from rft_platform.run.console import notes

    check_workflow_function(workflow_func)
    check_judge_function(judge_func)
    if len(candidate_models) < 2:
        raise ValueError(f"candidate_models has {len(candidate_models)}; give at least two models to choose from")
    names = [_name(model) for model in candidate_models]
    if max_threads < 1:
        raise ValueError(f"max_threads is {max_threads}; expected at least 1")
    tasks, slots = tasks_of(train_dataset, train_dataset.total_steps), asyncio.Semaphore(max_threads)
    measured = []
    for name, model in zip(names, candidate_models, strict=True):
        called = framework_models({name: model})[name]
        outputs = await asyncio.gather(*(_judged(task, called, workflow_func, judge_func, slots) for task in tasks))
        if all(isinstance(output, Exception) for output in outputs):
            raise UserCodeError(
                f"{name}: workflow or judge failed on every task; the first error: {described(outputs[0])}"
            )
        measured.append(outputs)
    rewards = _mean_rewards(measured)
    for name, reward, outputs in zip(names, rewards, measured, strict=True):
        failed = sum(isinstance(output, Exception) for output in outputs)
        line = f"{name}: mean reward {reward:.4f} on {len(tasks)} tasks" + (f", {failed} failed" if failed else "")
        notes().print(line, markup=False, soft_wrap=True)
    best = rewards.index(max(rewards))
    return candidate_models[best], {**_mean_metrics(measured[best]), "reward_avg": rewards[best]}


async def _judged(
    task: dict[str, Any], model: Any, workflow: WorkflowType, judge: JudgeType, slots: asyncio.Semaphore
) -> Any:
    """The judge's output on one task; the error if workflow or judge failed."""
    async with slots:
        started = time.perf_counter()
        try:
            output = await call_function(workflow, task=dict(task), model=model)
            metrics = {**(output.metrics or {}), "execution_time": time.perf_counter() - started}
            judged = await call_function(judge, task=task, response={"response": output.response, "metrics": metrics})
            if not math.isfinite(float(judged.reward)):
                raise ValueError(f"the judge's reward is {judged.reward}; expected a finite number")
            return judged
        except Exception as error:  # user code may raise anything
            _log.warning("%s: a task failed: %s", _name(model), described(error))
            return error


def _mean_rewards(measured: Sequence[Sequence[Any]]) -> list[float]:
    """The mean reward of each candidate over all tasks."""
    succeeded = [output for outputs in measured for output in outputs if not isinstance(output, Exception)]
    failed = FailureReward().after(float(output.reward) for output in succeeded)
    return [
        fmean(failed if isinstance(output, Exception) else float(output.reward) for output in outputs)
        for outputs in measured
    ]


def _mean_metrics(outputs: Sequence[Any]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for output in outputs:
        for name, value in (getattr(output, "metrics", None) or {}).items():
            values[name].append(float(value))
    return {f"{name}_avg": fmean(given) for name, given in values.items()}


def _name(model: Any) -> str:
    """The model's name, in the attribute that agent frameworks use. Raises ValueError for an object without one."""
    for attribute in ("model_name", "model", "model_id"):
        if isinstance(name := getattr(model, attribute, None), str):
            return name
    raise ValueError(
        f"candidate_models: {model!r} is not a model; expected objects that the workflow can call, such as "
        "AgentScope's OpenAIChatModel, or for a served model "
        "AuxiliaryModel(AuxiliarySpec(name, model, base_url, api_key_env)) of "
        "rft_platform.rollout.workflows.auxiliary"
    )
