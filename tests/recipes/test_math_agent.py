"""The math agent: problems new in template and numbers, a careless teacher, and the report of a shortened run."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.config.load import load_config
from rft_platform.rollout.workflows.calculator import calculate
from rft_platform.rounds.setup.demonstrations import write_demonstrations
from rft_platform.training.data.offline_data import read_demonstrations
from tests.support.recipe_projects import modules_of

pytestmark = pytest.mark.timeout(300)  # writing a project takes seconds on a quiet core
problems, demonstrations = modules_of("math-agent", "problems", "demonstrations")
Problems = list[problems.Problem]


@pytest.fixture(scope="module")
def recipe(project: Callable[[str], Path]) -> Path:
    """The configuration."""
    return project("math-agent") / "rft.yaml"


@pytest.fixture(scope="module")
def split() -> tuple[Problems, Problems]:
    """Explored and held-out problems."""
    return problems.split_problems()


def numbers_in(stories: Problems) -> set[int]:
    """All numbers of two or more digits in the texts."""
    words = " ".join(problem.question for problem in stories).replace(".", " ").split()
    return {int(word) for word in words if word.isdigit() and len(word) > 1}


def test_a_held_out_problem_is_new_in_template_and_numbers(split: tuple[Problems, Problems]) -> None:
    explored, held_out = split
    assert len({problem.question for problem in held_out}) == len(held_out) == problems.HELD_OUT
    assert not {problem.template for problem in explored} & {problem.template for problem in held_out}
    assert not numbers_in(explored) & numbers_in(held_out)
    assert numbers_in(held_out) == set().union(*(problem.numbers for problem in held_out))


def test_other_held_out_seeds_give_other_problems_of_the_same_kind(split: tuple[Problems, Problems]) -> None:
    explored, held_out = split
    again, other = problems.split_problems(held_out_seed=1)
    assert again == explored
    assert len({problem.question for problem in held_out} & {problem.question for problem in other}) < 5
    assert not {problem.template for problem in explored} & {problem.template for problem in other}


def test_the_answer_follows_from_the_question() -> None:
    generator = random.Random(3)
    explored, _ = problems.split_problems()
    for problem in generator.sample(explored, 200):
        value = problem.start
        for sentence in problem.question.split(". ")[1:]:
            number = next((int(word) for word in sentence.replace(".", "").split() if word.isdigit()), None)
            words = set(sentence.split())
            if number is None or words & {"years", "weighs", "house"}:
                continue
            if words & {"loses", "sells", "gives"}:
                value -= number
            elif "times" in words:
                value *= number
            else:
                value += number
        assert problem.answer == value, problem.question


def test_the_teacher_has_the_error_rate_of_the_recipe(split: tuple[Problems, Problems]) -> None:
    generator, explored = random.Random(5), split[0]
    conversations = [demonstrations.demonstrate(problem, generator) for problem in explored]
    answers = [conversation[-1]["content"] for conversation in conversations]
    right = [answer.split()[-1] == str(problem.answer) for answer, problem in zip(answers, explored, strict=True)]
    calls = [sum("tool_calls" in message for message in conversation) for conversation in conversations]
    assert 0.72 < sum(right) / len(right) < 0.80
    assert sum(calls) / len(calls) > 1.3 * (2 + problems.THREE_STEPS)
    formatted = [answer.startswith("Answer: ") for answer in answers]
    assert sum(formatted) / len(formatted) == pytest.approx(1 - demonstrations.UNFORMATTED, abs=0.03)
    for conversation in conversations[:300]:
        for call, result in zip(conversation[1:-1:2], conversation[2:-1:2], strict=True):
            arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
            assert result["content"] == str(calculate(arguments["expression"]))


@pytest.mark.slow
def test_the_longest_conversation_fits_the_model(recipe: Path) -> None:
    from transformers import AutoTokenizer

    config = load_config(recipe)
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_path)
    rows = [json.loads(line) for line in (recipe.parent / "tasks" / "demonstrations.jsonl").read_text().splitlines()]
    longest = max(rows, key=lambda row: len(row["messages"]))
    tokens = tokenizer.apply_chat_template(longest["messages"], tools=longest["tools"], return_dict=False)
    text = tokenizer.decode(tokens)
    assert text.startswith("<|im_start|>system\nTools: calculator(expression)<|im_end|>")
    shortened = [row for row in rows if len(row["messages"]) <= 2 + 2 * 9]
    assert len(shortened) > 0.97 * len(rows)


@pytest.mark.slow
def test_a_warm_start_trains_on_the_rendering_of_the_engine(recipe: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = load_config(recipe)
    assert config.warm_start is not None
    lines = (recipe.parent / "tasks" / "demonstrations.jsonl").read_text().splitlines(keepends=True)[:20]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(lines))
    settings, file = config.warm_start.model_copy(update={"path": str(few)}), tmp_path / "demonstrations.parquet"
    assert write_demonstrations(settings, file) == write_demonstrations(settings, tmp_path / "again.parquet")
    samples = read_demonstrations(str(file), Path(config.model.model_path)).samples
    conversations = [json.loads(line)["messages"] for line in lines]
    said = [message for conversation in conversations for message in conversation if message["role"] == "assistant"]
    assert len(samples) == len(said), "a row for each call and each answer"
    tokenizer = AutoTokenizer.from_pretrained(config.model.model_path)
    for sample, message in zip(samples, said, strict=True):
        learned = tokenizer.decode(sample.token_ids[sample.loss_mask])
        if "tool_calls" in message:
            call = message["tool_calls"][0]["function"]
            expected = f'<tool_call>\n{{"name": "calculator", "arguments": {call["arguments"]}}}\n</tool_call>'
        else:
            expected = message["content"]
        assert learned == f"{expected}<|im_end|>"
        assert len(sample.token_ids) < config.model.max_model_len
