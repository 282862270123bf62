"""The JSON object in a judge model's answer, which may be anything of any length."""

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.judging.llm.asking import LONGEST_OBJECT, InvalidAnswerError, last_object


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('first {"a": 1}, then {"a": {"b": 2}} and words', {"a": {"b": 2}}),
        ('```json\n{ "a": 1 }\n```', {"a": 1}),
        ('<think>{"a": 1}</think>{"a": 2}<think>{"a": 3}</think>', {"a": 2}),
        ('<think>never closed {"a": 2}', {"a": 2}),
        (r"\frac{1}{2} is {x}, so {" + '"a": 1} {', {"a": 1}),
        ('{"broken": {"a": 1}', {"a": 1}),
        ('{"a": "{"} {}', {}),
        ("x" * LONGEST_OBJECT + '{"a": 1}', {"a": 1}),
    ],
)
def test_the_last_object_counts(text: str, expected: dict[str, object]) -> None:
    assert last_object(text) == expected


@given(st.text(alphabet='{}[]":,1a \\<>/'))
def test_any_text_has_an_object_or_is_refused(text: str) -> None:
    with suppress(InvalidAnswerError):
        assert isinstance(last_object(text), dict)


@pytest.mark.parametrize(
    "unit",
    ["{", '{"a":', '{"', '{"a":1,', '{"a":[', "<think>", '{"a":"', "{ ", '{"a":{},', "}{", '{"a":[{},'],
)
def test_no_answer_takes_long(unit: str) -> None:
    started = time.process_time()
    for text in (unit * (1_000_000 // len(unit)), unit * 900 + "{}," * 300_000):
        with suppress(InvalidAnswerError):
            last_object(text)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("depth", [5_000, 100_000])
def test_an_object_that_is_nested_too_deep_is_no_answer(depth: int) -> None:
    with pytest.raises(InvalidAnswerError):
        last_object('{"a":' * depth)
