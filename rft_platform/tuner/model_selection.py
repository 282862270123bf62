"""``select_model()`` finds the model that solves a dataset's tasks best with a given workflow and judge."""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import Any

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.judging.types import check_judge_function
from rft_platform.rollout.workflow import check_workflow_function
from rft_platform.tuner.calls import call_function
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
    """Return the candidate with the highest mean reward, and the means of its judge's metrics, as ``<name>_avg``.

    The functions are those of ``tune()``; ``auxiliary_models`` is empty. At most ``max_threads`` tasks run at once.
    Nothing is trained, and every candidate must be a model object whose service is already running. The judge gets a
    ``response`` with the workflow's ``response`` and ``metrics``, to which ``execution_time`` in seconds is added. At
    most ``total_steps`` tasks are used. A task that fails with a candidate, or whose reward is not finite, does not
    count for this candidate. The mean of a metric includes only tasks that have the metric.

    Raises ValueError for fewer than two candidates, UserCodeError if a candidate fails on every task.
    """
    check_workflow_function(workflow_func)
    check_judge_function(judge_func)
    if len(candidate_models) < 2:
        raise ValueError(f"candidate_models has {len(candidate_models)}; give at least two models to choose from")
    tasks, slots = _tasks(train_dataset), asyncio.Semaphore(max_threads)
    best, reached, means = candidate_models[0], float("-inf"), dict[str, float]()
    for model in candidate_models:
        judged = await asyncio.gather(*(_judged(task, model, workflow_func, judge_func, slots) for task in tasks))
        reward, found = _means(model, [output for output in judged if output is not None])
        _log.info("%s: mean reward %.4f", _name(model), reward)
        if reward > reached:
            best, reached, means = model, reward, found
    return best, means


def _tasks(dataset: DatasetConfig) -> list[dict[str, Any]]:
    from rft_platform.tasks.sources import located_rows

    rows = located_rows(dataset.path, dataset.split_or_train, dataset.name)
    tasks = [row for _, _, row in islice(rows, dataset.total_steps)]
    if not tasks:
        raise UserError(f"{dataset.path}: the dataset is empty; expected at least one row")
    return tasks


async def _judged(
    task: dict[str, Any], model: Any, workflow: WorkflowType, judge: JudgeType, slots: asyncio.Semaphore
) -> Any:
    """The judge's output on one task; None if workflow or judge failed."""
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
            _log.warning("%s: a task is left out: %s: %s", _name(model), type(error).__name__, error)
            return None


def _means(model: Any, outputs: Sequence[Any]) -> tuple[float, dict[str, float]]:
    if not outputs:
        raise UserCodeError(f"{_name(model)}: workflow or judge failed on every task; see the warnings")
    values: defaultdict[str, list[float]] = defaultdict(list)
    for output in outputs:
        for name, value in (output.metrics or {}).items():
            values[name].append(float(value))
    return fmean(float(output.reward) for output in outputs), {
        f"{name}_avg": fmean(given) for name, given in values.items()
    }


def _name(model: Any) -> str:
    return str(getattr(model, "model_name", model))
