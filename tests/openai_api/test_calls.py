"""Calls of an endpoint: chunks are joined, and the items of a response become messages."""

from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.inference.interface import SamplingParams
from rft_platform.openai_api.calls import CallDefaults, ChatCall, StreamedAnswer
from rft_platform.openai_api.responses import chat_messages

MESSAGES: Any = [{"role": "user", "content": "12+34?"}]


def test_a_streamed_answer_is_whole_when_all_of_its_choices_have_finished() -> None:
    """An engine may send one choice after the other."""
    form = ChatCall({"messages": MESSAGES, "n": 2}, CallDefaults("m", SamplingParams(4).request_fields()))
    answer = StreamedAnswer(form)
    for index in (0, 1):
        for token, reason in ((7, None), (8, "stop")):
            content = [{"token": str(token), "logprob": -0.5}]
            piece = {"index": index, "delta": {"content": str(token)}, "logprobs": {"content": content}}
            chunk = {"id": "c", "choices": [{**piece, "token_ids": [token], "finish_reason": reason}]}
            whole = answer.add({**chunk, "prompt_token_ids": [1, 2]})
            assert whole == (index == 1 and reason == "stop")
    choices = form.sampled(answer.whole())
    assert [(choice.index, choice.token_ids, choice.message["content"]) for choice in choices] == [
        (0, [7, 8], "78"),
        (1, [7, 8], "78"),
    ]


def test_a_thought_joins_the_answer_that_follows_it() -> None:
    items: Any = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "g", "arguments": "{}"},
    ]
    system, _, turn = chat_messages(items)
    assert system == {"role": "system", "content": "rules"}
    assert (turn["content"], turn["reasoning_content"], len(turn["tool_calls"])) == ("a", "hm", 2)
    with pytest.raises(UserError, match="input"):
        chat_messages([])
