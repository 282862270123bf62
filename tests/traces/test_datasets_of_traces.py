"""The datasets that are made of traces."""

from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.traces.datasets import DEMONSTRATIONS, ScoreRule, datasets_of
from rft_platform.traces.readers.trace import Trace

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ASKED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "c1"}


def demonstration(*answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The roles and texts of the corrected conversation."""
    trace = Trace("t", None, [{"role": "user", "content": "How much?"}], list(answer), correction="It is 42.")
    (row,) = datasets_of([trace], {"format": "otel"}, ScoreRule()).rows[DEMONSTRATIONS]
    return [(message["role"], message["content"]) for message in row["messages"]]


def test_a_correction_comes_after_the_result_of_the_tool() -> None:
    expected = [("user", "How much?"), ("assistant", ""), ("tool", "42"), ("assistant", "It is 42.")]
    assert demonstration(ASKED, RESULT) == expected
    assert demonstration(ASKED, RESULT, {"role": "assistant", "content": "It is 41."}) == expected


@pytest.mark.parametrize("min_score", [None, 0.5])
def test_a_score_that_no_trace_has_is_refused(min_score: float | None) -> None:
    trace = Trace("t", None, [{"role": "user", "content": "How much?"}], [{"role": "assistant", "content": "42"}])
    with pytest.raises(UserError, match="--score helpful: the traces have no scores"):
        datasets_of([trace], {"format": "otel"}, ScoreRule("helpful", min_score))
    assert datasets_of([], {"format": "otel"}, ScoreRule("helpful", min_score)).rows[DEMONSTRATIONS] == []
