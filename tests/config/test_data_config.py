"""The data side of the configuration: task selectors, operators, dynamic sampling in the arithmetic of batches."""

from collections.abc import Callable

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.dry_run import render_plan, run_plan
from rft_platform.config.findings import refuse
from rft_platform.config.load import build_config, dump_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from tests.support.findings import warnings_of

Make = Callable[..., RftConfig]
SELECTOR = "buffer__explorer_input__taskset__task_selector"
OPERATORS = "data_processor__experience_pipeline__operators"


def test_selectors_by_their_names_and_aliases(make_config: Make) -> None:
    given = {"selector_type": "offline_easy2hard", "feature_keys": ["level"], "kwargs": {"descending": True}}
    config = make_config(**{SELECTOR: given})
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None
    assert taskset.task_selector.selector_type == "easy_to_hard"
    assert taskset.task_selector.args == {"descending": True}
    assert "easy_to_hard" in dump_config(config)
    with pytest.raises(UserError, match="'sequential', 'shuffle', 'random', 'easy_to_hard' or 'difficulty_based'"):
        make_config(**{SELECTOR: {"selector_type": "hardest"}})
    unread = make_config(**{SELECTOR: {"feature_keys": ["level"]}})
    with pytest.raises(UserError, match="feature_keys: shuffle does not use the difficulty of tasks"):
        refuse(settings_findings(resolve(unread), Machine(2, 0)))


@pytest.mark.parametrize(("tasksets", "without_effect"), [(1, ["tasksets[0].weight"]), (2, [])])
def test_the_weight_of_a_single_taskset_has_no_effect(
    make_config: Make, tasksets: int, without_effect: list[str]
) -> None:
    given = [{"path": f"data-{number}", "weight": 2} for number in range(tasksets)]
    config = make_config(buffer__explorer_input={"tasksets": given})
    keys = [line.partition(" has no effect")[0] for line in warnings_of(config) if ".weight" in line]
    assert keys == [f"buffer.explorer_input.{key}" for key in without_effect]


def test_an_evaluation_needs_no_selector(make_config: Make) -> None:
    config = make_config(
        buffer__explorer_input__eval_tasksets=[{"path": "x", "task_selector": {"selector_type": "random"}}]
    )
    assert [line for line in warnings_of(config) if "task_selector" in line] == [
        "buffer.explorer_input.eval_tasksets[0].task_selector has no effect here: an evaluation runs every task"
    ]


@pytest.mark.parametrize(
    ("judge", "named"),
    [("ranking", "ranking"), ([{"judge": "math"}, {"judge": "pairwise", "weight": 0.5}], "pairwise"), ("math", None)],
)
def test_a_judge_that_compares_runs_suits_no_held_out_tasks(
    make_config: Make, judge: object, named: str | None
) -> None:
    taskset = {"path": "x", "judge": judge}
    lines = warnings_of(make_config(buffer__explorer_input={"taskset": taskset, "eval_tasksets": [taskset]}))
    found = [line for line in lines if "compares the runs of a task with each other" in line]
    assert [line.partition(" compares")[0] for line in found] == [
        f"buffer.explorer_input.eval_tasksets[0].judge {name}" for name in [named] if name
    ]


def test_operators_are_read_in_order() -> None:
    operators = [{"name": "invalid_filter"}, {"name": "std_filter", "args": {"threshold": 0.1}}]
    config = build_config({"data_processor": {"experience_pipeline": {"operators": operators}}})
    assert [entry.name for entry in config.data_processor.experience_pipeline.operators] == [
        "invalid_filter",
        "std_filter",
    ]
    with pytest.raises(UserError, match=r"unknown key .*operators\[0\].arg; did you mean .*args"):
        build_config({"data_processor": {"experience_pipeline": {"operators": [{"name": "std_filter", "arg": {}}]}}})


def test_the_plan_lists_further_batches(make_config: Make) -> None:
    def lines(config: RftConfig, name: str) -> str:
        return render_plan(run_plan(resolve(config), gpu_count=0))

    assert "up to 3 batches of tasks instead of one" in lines(make_config(algorithm__algorithm_type="dapo"), "dapo")
    assert "dynamic sampling" not in lines(make_config(), "grpo")
    given = [{"name": "dynamic_sampling", "args": {"max_batches": 5}}]
    assert "up to 5 batches" in lines(make_config(**{OPERATORS: given}), "grpo")
    once = [{"name": "dynamic_sampling"}]
    assert "dynamic sampling" not in lines(
        make_config(algorithm__algorithm_type="dapo", **{OPERATORS: once}), "dapo"
    ), "an operator that is given takes the place of the algorithm's own"
