"""How much of a run's prompts continues its earlier calls."""

from typing import Any

import pytest

from rft_platform.experience.record import RolloutRow
from rft_platform.experience.schema import ROLLOUT_SCHEMA
from rft_platform.rollout.runner.report import row_counts, shared_prefix_tokens

Step = tuple[list[int], list[int]]  # prompt, answer


def row(run: int, step: int, prompt: list[int], answer: list[int]) -> RolloutRow:
    """A row of which only these matter."""
    others: dict[str, Any] = dict.fromkeys(ROLLOUT_SCHEMA.names, 0)
    given = {"run_id": f"run-{run}", "step": step, "prompt_ids": prompt, "response_ids": answer, "metrics": {}}
    return RolloutRow.from_columns(**{**others, **given})


def rows_of(*runs: list[Step]) -> list[RolloutRow]:
    return [row(number, step, *ids) for number, run in enumerate(runs) for step, ids in enumerate(run)]


APPENDS: list[Step] = [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [7])]


@pytest.mark.parametrize(
    ("runs", "shared", "total"),
    [
        ([APPENDS], 3 + 5, 4 + 6),
        ([[([1, 2], [3])], [([1, 2, 3], [4])]], 0, 0),  # another run is not an earlier call
        ([[([1, 2], [3]), ([1, 9, 3, 4], [5])]], 1, 4),  # the history was rewritten after its first token
        ([[([1, 2], [3]), ([8, 8], [9]), ([1, 2, 3, 4], [5])]], 0 + 3, 2 + 4),  # two sub-agents take turns
        ([[([1, 2], [3]), ([1], [4])]], 1, 1),
        ([APPENDS, [([1], [2]), ([5], [6])]], 8, 11),
    ],
)
def test_counts(runs: list[list[Step]], shared: int, total: int) -> None:
    assert shared_prefix_tokens(rows_of(*runs)) == (shared, total)


def test_choices_of_a_call_count_once_and_any_may_be_continued() -> None:
    first, second, later = rows_of([([1, 2], [3]), ([1, 2], [4]), ([1, 2, 4, 5], [6])])
    second.step, later.step = 0, 1
    assert shared_prefix_tokens([first, second, later]) == (3, 4)


def test_a_report_has_the_counts() -> None:
    counts = row_counts(rows_of(APPENDS))
    assert (counts["shared_prefix_tokens"], counts["later_prompt_tokens"]) == (8, 10)
