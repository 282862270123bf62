"""Metrics of AgentScope's kind as judges. The classes here have its shape; AgentScope's own run in tests/tuner."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.judging.execution.agentscope_metrics import MetricJudge, is_metric
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_runs
from rft_platform.judging.types import JudgeOutput

from .conftest import TASKS, run_rows


@dataclass
class MetricResult:
    name: str
    result: str | float | int
    metadata: dict[str, Any] | None = field(default=None)


class MetricBase(ABC):
    def __init__(self, name: str, metric_type: str = "numerical") -> None:
        self.name, self.metric_type = name, metric_type

    @abstractmethod
    async def __call__(self, *args: Any, **kwargs: Any) -> MetricResult: ...


class Closeness(MetricBase):
    async def __call__(self, task: dict[str, Any], response: str) -> MetricResult:
        off = abs(int(task["answer"]) - int(response))
        return MetricResult(self.name, 1 / (1 + off), {"off": off, "note": "not a number"})


class CheckEqual(MetricBase):
    """As in AgentScope's guide: made for one task, called with a solution."""

    def __init__(self, ground_truth: str) -> None:
        super().__init__("equal", "category")
        self.ground_truth = ground_truth

    async def __call__(self, solution: Any) -> MetricResult:
        return MetricResult(self.name, "pass" if solution.output == self.ground_truth else "fail")


class Essay(MetricBase):
    async def __call__(self, solution: Any) -> MetricResult:
        return MetricResult(self.name, "rather good")


class Verdicts(MetricBase):
    async def __call__(self, solution: Any) -> MetricResult:
        return MetricResult(self.name, solution.output)


closeness = Closeness("closeness")
verdicts = Verdicts("verdicts")


async def judged(metric: Any, task: dict[str, Any], response: str) -> JudgeOutput:
    return await MetricJudge(metric)(task, response)


async def test_a_number_is_the_reward_and_numbers_beside_it_are_metrics() -> None:
    output = await judged(closeness, {"answer": "5"}, "4")
    assert (output.reward, output.metrics) == (0.5, {"off": 1.0})


async def test_a_class_is_made_for_each_task_from_its_columns() -> None:
    assert (await judged(CheckEqual, {"ground_truth": "7", "question": "?"}, "7")).reward == 1.0
    assert (await judged(CheckEqual, {"ground_truth": "7", "question": "?"}, "8")).reward == 0.0
    with pytest.raises(UserError, match=r"metric CheckEqual: its constructor gets the task's columns \(question\)"):
        await judged(CheckEqual, {"question": "?"}, "7")


async def test_a_category_without_a_value_is_reported() -> None:
    with pytest.raises(ValueError, match="metric essay: its result 'rather good' is neither a number nor a category"):
        await judged(Essay("essay"), {}, "x")


def test_a_category_of_unknown_worth_costs_its_own_run_alone() -> None:
    runs = judge_runs(run_rows(["pass", "rather good"]), TASKS, build_judge(f"{__name__}:verdicts"))
    assert runs[0].reward == 1.0 and "neither a number nor a category" in str(runs[1].error)


def test_a_configuration_can_name_a_metric_class() -> None:
    (part,) = build_judge(f"{__name__}:closeness").parts
    assert isinstance(part.function, MetricJudge)
    (made,) = build_judge(f"{__name__}:CheckEqual").parts
    assert isinstance(made.function, MetricJudge)


def test_the_version_depends_on_the_metric() -> None:
    versions = {build_judge(f"{__name__}:{name}").version for name in ("closeness", "CheckEqual")}
    assert len(versions) == 2
    assert MetricJudge(Closeness("a")).__dict__ != MetricJudge(Essay("a")).__dict__


def test_other_things_are_no_metrics() -> None:
    assert is_metric(closeness) and is_metric(CheckEqual)
    assert not any(is_metric(value) for value in (len, JudgeOutput, object(), lambda task, response: 0.0))
