"""What a taskset and a step come to where little is written: the judge, and steps of whole rounds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.dry_run import render_plan, run_plan
from rft_platform.config.findings import refuse
from rft_platform.config.load import build_config, dump_config
from rft_platform.config.resolve import WHOLE_ROUND, RunLength, resolve
from rft_platform.config.schema.buffer import Taskset
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.training.loop.plan import group_steps

MakeConfig = Callable[..., RftConfig]
TASKSET = "buffer__explorer_input__taskset"


def problems(config: RftConfig, algorithm: str = "grpo") -> str:
    try:
        refuse(settings_findings(resolve(config), Machine(2, 0)))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("written", "judge"),
    [
        ({}, "exact_match"),
        ({"workflow": "calculator"}, "exact_match"),
        ({"format": {"response_key": None}}, None),
        ({"workflow": "agent.py:solve"}, None),
        ({"default_workflow_type": "agents:Solve"}, None),
        ({"workflow": "agent.py:solve", "judge": "numeric"}, "numeric"),
        ({"workflow": "agent.py:solve", "default_reward_fn_type": "gsm8k"}, "gsm8k"),
        ({"judge": None}, None),
    ],
)
def test_the_judge_that_is_not_written(written: dict[str, Any], judge: str | None) -> None:
    assert Taskset.model_validate({"path": "tasks.jsonl", **written}).judge == judge


def test_an_explicit_judge_is_written_to_the_stored_configuration(make_config: MakeConfig) -> None:
    written = make_config(**{f"{TASKSET}__workflow": "agent.py:solve", f"{TASKSET}__judge": "exact_match"})
    assert "judge: exact_match" in dump_config(written)


def test_a_built_in_workflow_without_reward_needs_a_judge(make_config: MakeConfig) -> None:
    assert "computes no reward; set a judge" in problems(make_config(**{f"{TASKSET}__judge": None}))
    assert not problems(make_config(**{f"{TASKSET}__judge": None, f"{TASKSET}__workflow": "agent.py:solve"}))


def test_a_step_of_a_whole_round(make_config: MakeConfig) -> None:
    config = make_config(buffer__train_batch_size="round", **{f"{TASKSET}__workflow": "agent.py:solve"})
    assert problems(config) == ""
    run = resolve(config)
    assert (run.batches.steps_a_round, run.batches.whole_round, run.length()) == (1, True, RunLength(rounds=3, steps=3))
    assert "one optimiser step a round, with all its experiences" in render_plan(run_plan(resolve(config), gpu_count=0))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "train"}, "mode train explores no rounds"),
        ({"synchronizer__sync_style": "dynamic_by_explorer"}, "trains as soon as the rows of a step are stored"),
        ({"buffer__trainer_input__experience_buffer__replay_buffer__enable": True}, "fills steps to a fixed size"),
    ],
)
def test_settings_that_count_steps_refuse_train_batch_size_round(
    make_config: MakeConfig, settings: dict[str, Any], said: str
) -> None:
    found = problems(make_config(buffer__train_batch_size="round", **settings))
    assert "buffer.train_batch_size round" in found and said in found


def test_the_plan_lists_workflow_judge_and_order_of_tasks(make_config: MakeConfig) -> None:
    config = make_config(**{f"{TASKSET}__workflow": "agent.py:solve", "explorer__workers__kind": "process"})
    text = render_plan(run_plan(resolve(config), gpu_count=0))
    assert "workflow agent.py:solve, judge none (the workflow's own reward)" in text
    assert "tasks shuffle, runs in worker processes of this Python, operators none" in text


def test_an_error_in_another_key_gives_one_line() -> None:
    with pytest.raises(UserError) as told:
        build_config({"buffer": {"explorer_input": {"taskset": {"path": "x", "workflow": 3}}}})
    assert str(told.value).count("\n") == 0


def test_however_many_rows_a_round_has_it_is_one_step() -> None:
    groups = np.repeat(np.arange(40), np.arange(1, 41))
    (step,) = group_steps(groups, WHOLE_ROUND, seed=3, epochs=1)
    assert sorted(step) == list(range(len(groups)))
