"""Tasks and judge of the package reasoning-gym. They run in examples/reasoning_gym/.venv, which has the package."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rft_platform.cluster.child import Child, repeatable_environment
from rft_platform.common.errors import UserError
from rft_platform.judging.judge_context import JudgeContext, JudgeState
from rft_platform.judging.rules import puzzles
from rft_platform.tasks.dataset import load_tasks
from rft_platform.tasks.reasoning_gym import COLUMN, REFUSED, SPLITS, GymSource, entry_of

pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym: make test-agents")

# Packages that reasoning-gym needs leave files open and use deprecated calls.
pytestmark = [
    pytest.mark.slow,  # rows and scores are made in other processes
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def rows(path: str, split: str = "train") -> list[dict[str, Any]]:
    """The rows of a source."""
    return [row for _, row in GymSource.parse(path).rows(split)]


def rows_of_all(count: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of every dataset that is not refused, from one process."""
    module, arguments = "rft_platform.tasks.reasoning_gym", {"size": 20 * count, "seed": seed, "options": {}}
    with Child(module, imports=("reasoning_gym",), env=repeatable_environment()) as child:
        return {
            name: child.ask("drawn_rows", {"dataset": name, **arguments}, SPLITS["train"], count)
            for name in sorted(set(names()) - set(REFUSED))
        }


def reasoning_gym(row: dict[str, Any], response: str) -> float:
    """The judge's score of one response; it needs no folder."""
    return asyncio.run(puzzles.reasoning_gym(row, response, JudgeContext(JudgeState(Path("unused")), {})))


def names() -> list[str]:
    """Every dataset of the package."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def test_every_dataset_gives_its_own_answers_1_and_other_answers_less() -> None:
    wrong = {}
    for name, drawn in rows_of_all(3, seed=11).items():
        own = [reasoning_gym(row, row["answer"]) for row in drawn]
        other = [reasoning_gym(row, "" if row["answer"] else "none") for row in drawn]
        if own != [1.0] * 3 or max(other) >= 1.0:
            wrong[name] = (own, other)
    assert wrong == {}
    assert len(set(names()) - set(REFUSED)) >= 100


def test_no_scorer_executes_the_text_of_an_answer(tmp_path: Path) -> None:
    executed = []
    for name, (row,) in rows_of_all(1, seed=5).items():
        for form in ("{}", "[{}]", "[[str({})]]", "1 + 0*bool({})", "x + sin({})", '{{"a": {}}}', "Q {}"):
            mark = tmp_path / name
            reasoning_gym(
                row, "<answer>" + form.format(f"__import__('pathlib').Path({str(mark)!r}).touch()") + "</answer>"
            )
            if mark.exists():
                executed.append((name, form))
                mark.unlink()
    assert executed == []


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "factorial(9999999)"),
        ("puzzle24", "9999999!"),
        ("simple_integration", "factorial(9999999)"),
        ("polynomial_multiplication", "(x + y + z)**9**9**9"),
        ("coin_flip", "1e999999999"),
        ("string_insertion", "oracle_answer"),
        ("n_queens", "valid_solutions"),
    ],
)
def test_a_costly_answer_or_one_that_names_variables_has_no_score(name: str, answer: str) -> None:
    (row,) = rows(f"reasoning_gym:{name}?size=1&seed=5")
    started = time.monotonic()
    assert reasoning_gym(row, answer) <= 0.01
    assert time.monotonic() - started < puzzles._LIMIT_S * 10


@pytest.mark.parametrize(
    ("name", "right", "share"),
    [
        ("spiral_matrix", lambda row: str(row["answer"].split()), 0.1),
        ("string_insertion", lambda row: str(list(row["answer"])), 0.1),
        ("binary_matrix", lambda row: str([line.split() for line in row["answer"].split("\n")]), 0.1),
        ("n_queens", lambda row: str([line.split() for line in row["answer"].split("\n")]), 0.5),
        ("n_queens", lambda row: entry_of(row[COLUMN])[1]["metadata"]["valid_answers"][-1], 1.0),
        ("countdown", lambda row: f"({row['answer']})", 1.0),
        ("simple_integration", lambda row: f"{row['answer']} + sqrt(2)*exp(0) - pi", 1.0),
        ("polynomial_multiplication", lambda row: f"1 + {row['answer']} - 1", 1.0),
    ],
)
def test_answers_in_other_notations_have_the_scores_of_the_data_set(name: str, right: Any, share: float) -> None:
    (row,) = rows(f"reasoning_gym:{name}?size=1&seed=5")
    assert reasoning_gym(row, right(row)) == share


def test_an_entry_that_cannot_be_made_within_the_limit_is_an_error_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puzzles, "_LIMIT_S", 0.05)
    (row,) = rows("reasoning_gym:acre?size=2000&seed=5")[:1]
    with pytest.raises(
        ValueError, match=r"entry \d+ of reasoning_gym:acre cannot be made within the limits of a judge"
    ):
        reasoning_gym(row, "on")


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


def test_rows_are_equal_in_processes_with_different_seeds_of_hashes() -> None:
    code = (
        "from rft_platform.tasks.reasoning_gym import GymSource\n"
        "names = ('polynomial_multiplication', 'isomorphic_strings', 'list_functions', 'ransom_note', 'word_ladder')\n"
        "print([list(GymSource.parse(f'reasoning_gym:{name}?size=5&seed=3').rows('train')) for name in names])\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(found) == 1


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
