"""The calculator recipe: problems held out for good, a careless teacher, and demonstrations that a warm start reads."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rft_platform.config.load import load_config
from rft_platform.recipes.calculator.demonstrations import WRONG_ANSWER, WRONG_OPERATION
from rft_platform.recipes.calculator.prepare import prepare
from rft_platform.recipes.calculator.problems import KINDS, split_problems
from rft_platform.rollout.workflows.calculator import calculate
from rft_platform.rounds.setup.demonstrations import write_demonstrations
from rft_platform.training.data.offline_data import read_demonstrations


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared configuration."""
    return prepare(tmp_path_factory.mktemp("recipe") / "calculator")


def conversations(recipe: Path) -> list[list[dict[str, Any]]]:
    """The demonstrations."""
    lines = (recipe.parent / "tasks" / "demonstrations.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"] for line in lines]


def test_held_out_expressions_are_not_explored() -> None:
    explored, held_out = split_problems()
    assert not {problem.expression for problem in explored} & {problem.expression for problem in held_out}
    assert set(Counter(problem.kind for problem in held_out)) == set(KINDS)


def test_the_teacher_really_calculates_and_is_right_as_seldom_as_it_says(recipe: Path) -> None:
    explored, _ = split_problems()
    right = 0
    for problem, (question, call, result, answer) in zip(explored, conversations(recipe), strict=True):
        assert question["content"] == problem.question
        (made,) = call["tool_calls"]
        assert result["content"] == str(calculate(json.loads(made["function"]["arguments"])["expression"]))
        right += answer["content"] == problem.answer
    expected = (1 - WRONG_ANSWER) * sum(1 - share for share, _ in WRONG_OPERATION.values()) / len(WRONG_OPERATION)
    assert right / len(explored) == pytest.approx(expected, abs=0.03) and expected < 0.6


def test_a_warm_start_learns_calls_and_answers_as_the_engine_renders_them(recipe: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = load_config(recipe)
    assert config.warm_start is not None and config.algorithm.algorithm_type == "multi_step_grpo"
    few = tmp_path / "few.jsonl"
    few.write_text("".join(Path(config.warm_start.path).read_text().splitlines(keepends=True)[:20]))
    settings, file = config.warm_start.model_copy(update={"path": str(few)}), tmp_path / "demonstrations.parquet"
    assert write_demonstrations(settings, file) == write_demonstrations(settings, tmp_path / "again.parquet")
    rows = read_demonstrations(str(file), Path(config.model.model_path))
    assert len(rows.samples) == 2 * 20, "the call and the answer of each conversation"
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_path)
    first, second = rows.samples[:2]
    texts = [tokenizer.decode(sample.token_ids[sample.loss_mask]) for sample in (first, second)]
    _, call, _, answer = conversations(recipe)[0]
    arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
    assert (
        texts[0]
        == f'<tool_call>\n{{"name": "calculator", "arguments": {json.dumps(arguments)}}}\n</tool_call><|im_end|>'
    )
    assert texts[1] == f"{answer['content']}<|im_end|>"
    assert len(first.token_ids) < config.model.max_model_len


def test_preparing_again_changes_nothing(recipe: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in recipe.parent.rglob("*") if file.is_file()}
    assert prepare(recipe.parent) == recipe
    assert {file: file.stat().st_mtime_ns for file in recipe.parent.rglob("*") if file.is_file()} == before
