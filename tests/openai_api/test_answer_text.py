"""Ids to text in pieces, stop strings included."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rft_platform.openai_api.answers import AnswerForm, ChoiceBuilder
from rft_platform.openai_api.parsers import AnswerText, OutputParser, StopWatch, TextStream, cut_at_stop, held_back
from rft_platform.openai_api.tokenizer import PolicyTokenizer


def by_bytes(ids: list[int]) -> str:
    """A byte-level tokenizer: id = byte; ids from 256 on are special and show nothing."""
    return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def fed(answer: AnswerText, ids: list[int], sizes: list[int]) -> str:
    shown, position, turn = "", 0, 0
    while position < len(ids):
        end = position + sizes[turn % len(sizes)]
        shown += answer.feed(ids[position:end], last=end >= len(ids))[1]
        position, turn = end, turn + 1
    return shown


TEXTS = st.text(alphabet="abc€é😀 \n", max_size=30)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=20)


@given(TEXTS, SIZES)
def test_pieces_add_up_and_never_show_half_a_character(text: str, sizes: list[int]) -> None:
    ids = [300, *text.encode(), 300]
    stream, shown, position, turn = TextStream(by_bytes), [], 0, 0
    while position < len(ids):
        end = position + sizes[turn % len(sizes)]
        shown.append(stream.feed(ids[position:end], last=end >= len(ids)))
        position, turn = end, turn + 1
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


@given(st.lists(st.integers(0, 257), min_size=1, max_size=30), SIZES)
def test_invalid_bytes_add_up_too(ids: list[int], sizes: list[int]) -> None:
    assert fed(AnswerText(by_bytes, ()), ids, sizes) == by_bytes(ids)


@given(TEXTS, st.lists(st.text(alphabet="abc€ ", min_size=1, max_size=3), max_size=3), SIZES)
def test_stop_strings_are_cut_wherever_the_pieces_end(text: str, stops: list[str], sizes: list[int]) -> None:
    # The engine ends a row at the token that completes a stop string, so nothing comes after it.
    ids: list[int] = []
    for token in text.encode():
        ids.append(token)
        if any(stop in by_bytes(ids) for stop in stops):
            break
    if ids:
        assert fed(AnswerText(by_bytes, stops), ids, sizes) == cut_at_stop(by_bytes(ids), stops)[0]


def test_the_longest_prefix_of_a_stop_string_is_held_back() -> None:
    assert held_back("xa", ["ab", "xab"]) == 2
    assert held_back("xab", ["ab"]) == 0
    assert held_back("", ["ab"]) == 0


def test_stop_watch_sees_a_stop_string_across_tokens_and_only_in_its_window() -> None:
    watch = StopWatch(["€x"], by_bytes)
    hits = [watch.hit(token) for token in [*"long text before €".encode(), ord("x")]]
    assert hits == [False] * (len(hits) - 1) + [True]
    assert len(watch.recent) <= watch.window


def test_a_forced_beginning_is_part_of_the_call() -> None:
    answer = AnswerText(by_bytes, (), OutputParser('<tool_call>\n{"name": "f", "arguments": ', tools=True))
    _, shown, calls = answer.feed(list(b'{"x": 1}}\n</tool_call>'), last=True)
    assert shown == "" and [call["function"] for call in calls] == [{"name": "f", "arguments": '{"x": 1}'}]
    assert answer.finish_reason("stop") == "tool_calls" and answer.finish_reason("length") == "length"


def test_text_offsets_go_on_from_chunk_to_chunk(tiny_model: Path) -> None:
    tokenizer = PolicyTokenizer(tiny_model)
    (ids,) = tokenizer.encode(["12 + 34 = 46"])
    values = [-1.0] * len(ids)

    def builder() -> ChoiceBuilder:
        form = AnswerForm(False, "m", tokenizer, logprobs=True, token_ids=False, prompts=[[1]], n=1)
        return ChoiceBuilder(form, 0, AnswerText(tokenizer.decode, ()))

    whole = builder().whole(ids, values, [], "stop")["logprobs"]["text_offset"]
    streaming, offsets = builder(), []
    for number, token in enumerate(ids):
        for chunk in streaming.add([token], [-1.0], [[]], "stop" if number == len(ids) - 1 else None):
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    assert offsets == whole and whole[-1] > 0
