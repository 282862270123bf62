"""The online demo: a configuration that `rft serve` accepts, and questions whose answers are not given away."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.run.checks import check_run
from tests.support.recipe_projects import modules_of

pytestmark = pytest.mark.timeout(300)  # writing a project takes seconds on a quiet core
(questions,) = modules_of("front-desk", "questions")


@pytest.mark.slow
def test_the_recipe_is_an_online_project_that_may_start(project: Callable[[str], Path], tmp_path: Path) -> None:
    config = load_config(project("front-desk") / "rft.yaml")
    assert config.online
    plan = check_run(Home(tmp_path / "home"), config, service=True)
    assert "round k collects rows when 512 are committed" in " ".join(plan.sections["order"])


@pytest.mark.slow
def test_demonstrations_name_a_department_by_chance_and_held_out_orders_are_new(project: Callable[[str], Path]) -> None:
    folder = project("front-desk") / "questions"
    shown, held_out = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "test")
    )
    departments = questions.DEPARTMENTS
    right = sum(any(row["question"].startswith(each) for each in departments[row["answer"]]) for row in shown)
    assert 0.25 < right / len(shown) < 0.42
    assert not {row["question"] for row in shown} & {row["question"] for row in held_out}
