"""docs/data.md says what the code does: operators, selectors, their options, and examples that work."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rft_platform.algorithms.presets import choose
from rft_platform.config.load import build_config
from rft_platform.config.resolve import resolve
from rft_platform.judging.execution.experience_pipeline import Operator, Pipeline
from rft_platform.judging.operators.registry import OPERATORS, Experiences
from rft_platform.rounds.setup.algorithm import check_operators
from rft_platform.tasks.selectors import SELECTORS, find_selector

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def options(name: str) -> str:
    (line,) = [line for line in TEXT.splitlines() if re.match(rf"\| `{name}`", line)]
    return line.strip("|").split("|")[-1]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        *((name, OPERATORS.get(name)) for name in OPERATORS.names()),
        *((name, SELECTORS.get(name)) for name in SELECTORS.names()),
    ],
)
def test_the_page_lists_every_option_with_its_default(name: str, function: Callable[..., Any]) -> None:
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    told = {key: yaml.safe_load(value or "null") for key, value in re.findall(r"`(\w+)(?:: ([^`]+))?`", options(name))}
    assert told == {p.name: None if p.default is p.empty else p.default for p in keywords}


@pytest.mark.parametrize("block", BLOCKS)
def test_the_examples_are_sound(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(tmp_path, monkeypatch)
    config = build_config(yaml.safe_load(block))
    check_operators(resolve(config))
    taskset = config.buffer.explorer_input.taskset
    if taskset is not None:
        find_selector(taskset.task_selector.selector_type, taskset.task_selector.args)
    settings = config.algorithm
    choose(settings.algorithm_type, advantage=settings.advantage_fn)


def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my_operators.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_operator_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(tmp_path, monkeypatch)
    reward = np.array([1.0, 1.0, 0.0, 1.0])
    found = Pipeline.of([Operator("my_operators:shortest_pass", {"bonus": 0.2})]).apply(
        Experiences(
            run_N=np.arange(4),
            step_N=np.zeros(4, np.int64),
            length_N=np.array([5, 3, 1, 9]),
            truncated_N=np.zeros(4, bool),
            kept_N=np.ones(4, bool),
            run_ids=tuple("abcd"),
            group_ids=("g", "h"),
            task_ids=("t", "u"),
            group_R=np.array([0, 0, 0, 1]),
            empty_R=np.zeros(4, bool),
            judged_R=reward,
            reward_R=reward,
            kept_R=np.ones(4, bool),
        )
    )
    assert found.experiences.reward_R.tolist() == [1.0, 1.2, 0.0, 1.2]
    assert found.reports[0].facts == {"bonuses": 2.0}
