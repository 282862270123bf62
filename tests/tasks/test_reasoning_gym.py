"""Tasks and judge of the package reasoning-gym. They run in examples/reasoning_gym/.venv, which has the package."""

from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.judging.rules.puzzles import reasoning_gym
from rft_platform.tasks.dataset import load_tasks
from rft_platform.tasks.reasoning_gym import COLUMN, REFUSED, GymSource

pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym: make test-agents")

# Packages that reasoning-gym needs leave files open and use deprecated calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def rows(path: str, split: str = "train") -> list[dict[str, Any]]:
    """The rows of a source."""
    return [row for _, row in GymSource.parse(path).rows(split)]


def names() -> list[str]:
    """Every dataset of the package."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


@pytest.mark.slow
def test_every_dataset_gives_its_own_answers_1_and_other_answers_less() -> None:
    wrong = {}
    for name in sorted(set(names()) - set(REFUSED)):
        drawn = rows(f"reasoning_gym:{name}?size=3&seed=11")
        own = [reasoning_gym(row, row["answer"]) for row in drawn]
        other = [reasoning_gym(row, "" if row["answer"] else "none") for row in drawn]
        if own != [1.0] * 3 or max(other) >= 1.0:
            wrong[name] = (own, other)
    assert wrong == {}
    assert len(set(names()) - set(REFUSED)) >= 100


def test_refused_data_sets_state_no_answer() -> None:
    from reasoning_gym import create_dataset

    for name in sorted(set(REFUSED) - {"composite"}):
        entry = create_dataset(name, size=1, seed=3)[0]
        assert entry["answer"] is None, f"{name} has an answer now: it need not be refused"
        with pytest.raises(UserError, match=f"{name} is not supported: it accepts many answers"):
            GymSource.parse(f"reasoning_gym:{name}")
    with pytest.raises(UserError, match="composite is not supported: it is a mixture"):
        GymSource.parse("reasoning_gym:composite")


def test_rows_are_repeatable_and_splits_differ() -> None:
    path = "reasoning_gym:chain_sum?size=40&seed=5&min_terms=2&max_terms=3"
    train, test = rows(path), rows(path, "test")
    assert rows(path) == train and rows(path, "test") == test
    assert train[0][COLUMN]["options"] == {"min_terms": 2, "max_terms": 3}
    assert rows("reasoning_gym:chain_sum?size=40&seed=6&min_terms=2&max_terms=3") != train


def test_splits_share_no_question_whatever_their_sizes_and_seeds() -> None:
    options = "min_terms=2&max_terms=2&min_digits=1&max_digits=2"
    asked: dict[str, set[str]] = {}
    for seed, size in ((1, 600), (2, 50)):
        for split in ("train", "validation", "test"):
            path = f"reasoning_gym:chain_sum?size={size}&seed={seed}&{options}"
            found = [row["question"] for row in rows(path, split)]
            assert len(found) == len(set(found)) == size
            asked.setdefault(split, set()).update(found)
    assert not asked["train"] & asked["test"] and not asked["train"] & asked["validation"]
    assert not asked["validation"] & asked["test"]
    few = rows("reasoning_gym:chain_sum?size=500&min_terms=2&max_terms=2&min_digits=1&max_digits=1")
    assert 50 < len(few) < 500, "the questions of a small space end"
    with pytest.raises(UserError, match="split 'held-out' given, expected one of train, validation, test"):
        rows("reasoning_gym:chain_sum", "held-out")


def test_tasks_have_questions_answers_and_slices() -> None:
    found = load_tasks("reasoning_gym:chain_sum?size=40", split="train[:10]+test[:5]")
    assert len(found.tasks) == 15 and found.report.rows == 15
    task = found.tasks[0]
    assert task.taskset == "chain_sum-train[:10]+test[:5]" and "arithmetic" in task.prompt
    assert reasoning_gym(task.raw, f"I add them. <answer> {task.answer} </answer>") == 1.0
    assert reasoning_gym(task.raw, f"{task.answer} <answer>no</answer>") < 1.0


def test_an_answer_that_the_scorer_cannot_read_has_no_score() -> None:
    (row,) = rows("reasoning_gym:prime_factorization?size=1")
    assert reasoning_gym(row, "no such answer") == 0.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:chain_sums", "unknown dataset; expected for example .*chain_sum"),
        ("reasoning_gym:chain_sum?min_term=2", "does not take these options: .*min_term"),
        ("reasoning_gym:chain_sum?min_terms=0", "does not take these options"),
        ("reasoning_gym:chain_sum?size=0", "size and seed are whole numbers"),
        ("reasoning_gym:chain_sum?size=many", "size and seed are whole numbers"),
    ],
)
def test_a_bad_source_is_refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GymSource.parse(path)
