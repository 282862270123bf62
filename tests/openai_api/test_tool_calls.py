"""Hermes tool calls: whole and in pieces."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.openai_api.parsers import AnswerText, OutputParser, ToolCall
from rft_platform.openai_api.tokenizer import PolicyTokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "</x>"]}}\n</tool_call>'


def parse_tool_calls(text: str) -> tuple[str | None, list[ToolCall]]:
    """(text outside the calls, calls) of a whole answer; the text is None if there are calls but no text."""
    _, content, calls = OutputParser(tools=True).feed(text, last=True)
    return (content or None if calls else content), calls


def plain(calls: list[ToolCall]) -> list[tuple[str, object]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


DEEP, DIGITS = "[" * 100_000, '{"name": ' + "9" * 5000 + "}"
ADD = ("add", {"a": 1, "b": [2, "</x>"]})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text ", "just text ", []),
        ("", "", []),
        (CALL, None, [ADD]),
        (f"Let me see.\n{CALL}", "Let me see.", [ADD]),
        (f"{CALL}\n{CALL}\n", None, [ADD, ADD]),
        (f"a\n{CALL}\n b {CALL} c \n", "abc \n", [ADD, ADD]),
        (CALL.removesuffix("</tool_call>"), None, [ADD]),  # cut off, but whole
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("<tool_call>[1]</tool_call> x", "<tool_call>[1]</tool_call> x", []),
        (f"<tool_call>{DEEP}</tool_call>", f"<tool_call>{DEEP}</tool_call>", []),
        (f"<tool_call>{DIGITS}</tool_call>", f"<tool_call>{DIGITS}</tool_call>", []),
        ('x <tool_call>{"name": "a', 'x <tool_call>{"name": "a', []),
        ("a < b <tool_cal", "a < b <tool_cal", []),
        ('<tool_call>{"name": "now"}</tool_call>', None, [("now", {})]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [("now", {})]),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud83d"}}</tool_call>', None, [("f", {"x": "\ufffd"})]),
        ('<tool_call>{"name": "\\ud83d"}</tool_call>', None, [("\ufffd", {})]),
        ('<tool_call>{"name": "f", "x": NaN}</tool_call>', '<tool_call>{"name": "f", "x": NaN}</tool_call>', []),
    ],
)
def test_texts_and_calls(text: str, content: str | None, calls: list[tuple[str, object]]) -> None:
    found, parsed = parse_tool_calls(text)
    assert (found, plain(parsed)) == (content, calls)


PIECES = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "{", "text", " ", "\n", "<", "<tool", '{"name": "f"}', "é"]
)


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_the_pieces_of_a_stream_do_not_matter(text: str, sizes: list[int]) -> None:
    parser, shown, position, turn = OutputParser(tools=True), "", 0, 0
    calls: list[ToolCall] = []
    while position < len(text):
        piece = text[position : position + sizes[turn % len(sizes)]]
        position, turn = position + len(piece), turn + 1
        _, more, found = parser.feed(piece, last=False)
        shown, calls = shown + more, calls + found
    _, more, found = parser.feed("", last=True)
    content, whole = parse_tool_calls(text)
    assert (shown + more) == (content or "")
    assert plain(calls + found) == plain(whole)


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    parser = OutputParser(tools=True)
    assert [parser.feed(piece, last=False)[1] for piece in ("Hello", " <too", "t> ", "x<tool_call>")] == [
        "Hello",
        "",
        " <toot>",
        " x",
    ]


def test_ids_are_unique() -> None:
    _, calls = parse_tool_calls(CALL * 3)
    assert len({call["id"] for call in calls}) == 3


def test_tags_that_the_tokenizer_calls_special_are_seen(tiny_model: Path, tmp_path: Path) -> None:
    own = PolicyTokenizer(tiny_model).hf
    own.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|other|>"]})
    folder = shutil.copytree(tiny_model, tmp_path / "special")
    own.save_pretrained(folder)
    tokenizer = PolicyTokenizer(folder)
    (ids,) = tokenizer.encode([f"<|other|>{CALL}"])
    end = own.eos_token_id
    assert tokenizer.decode([*ids, end]) == CALL and tokenizer.decode_many([ids, [end]]) == [CALL, ""]
    answer = AnswerText(tokenizer.decode, [], OutputParser(tools=True))
    _, text, calls = answer.feed([*ids, end], last=True)
    assert (text, plain(calls)) == ("", [ADD])
