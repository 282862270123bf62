"""Calls of an endpoint: chunks are joined; items become messages; a response is the same whole and in chunks."""

import json
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.inference.interface import SamplingParams
from rft_platform.openai_api.calls import CallDefaults, ChatCall, StreamedAnswer
from rft_platform.openai_api.responses import ResponseBuilder, chat_messages

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


def streamed(*deltas: dict[str, Any], reason: str) -> dict[str, Any]:
    """The response of a streamed chat answer."""
    builder = ResponseBuilder({}, "m")
    for number, delta in enumerate(deltas):
        last = number == len(deltas) - 1
        choice = {"index": 0, "delta": delta, "finish_reason": reason if last else None}
        builder.of_chunk({"id": "chatcmpl-1", "choices": [choice]})
    builder.finish()
    return builder._frame


def test_text_after_a_tool_call_is_an_item_of_its_own_and_of_the_same_turn() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    response = streamed({"content": "before"}, {"tool_calls": [call]}, {"content": " after"}, reason="tool_calls")
    ids = [item["id"] for item in response["output"]]
    assert len(ids) == len(set(ids)) == 3
    answer: Any = {"type": "function_call_output", "call_id": "c", "output": "42"}
    user, turn, tool = chat_messages([{"role": "user", "content": "q"}, *response["output"], answer])
    assert (user["role"], tool["role"]) == ("user", "tool")
    assert turn["content"] == "before after" and [each["id"] for each in turn["tool_calls"]] == ["c"]


@pytest.mark.parametrize(("reason", "named"), [("length", "max_output_tokens"), ("abort", "abort")])
def test_a_cut_answer_is_incomplete(reason: str, named: str) -> None:
    response = streamed({"content": "cut he"}, reason=reason)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": named})
    assert response["output"][0]["status"] == "incomplete"


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


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("message", "reason", "items"),
    [
        ({"content": "4"}, "stop", [("message", "completed")]),
        ({"content": "4", "reasoning_content": "so"}, "stop", [("reasoning", "completed"), ("message", "completed")]),
        ({"content": "4", "reasoning": "so"}, "length", [("reasoning", "completed"), ("message", "incomplete")]),
        ({"content": None, "tool_calls": [CALL, CALL]}, "tool_calls", [("function_call", "completed")] * 2),
        ({"content": "a", "tool_calls": [CALL]}, "stop", [("message", "completed"), ("function_call", "completed")]),
        ({"content": "", "reasoning_content": "s"}, "length", [("reasoning", "incomplete"), ("message", "incomplete")]),
        ({"content": ""}, "stop", [("message", "completed")]),
    ],
)
def test_a_response_is_the_same_whole_and_in_chunks(
    message: dict[str, Any], reason: str, items: list[tuple[str, str]]
) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    answer = {"id": "chatcmpl-1", "created": 5, "model": "m", "usage": usage, "policy_version": 3}
    whole = ResponseBuilder({}, "m").whole({**answer, "choices": [{"message": message, "finish_reason": reason}]})
    deltas: list[dict[str, Any]] = [{name: value} for name, value in message.items() if name.startswith("reasoning")]
    deltas += [{"content": character} for character in message["content"] or ""]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls", []))]
    choices = [{"delta": delta, "finish_reason": None} for delta in deltas] + [{"delta": {}, "finish_reason": reason}]
    builder = ResponseBuilder({}, "m")
    for choice in choices:
        builder.of_chunk({**answer, "choices": [choice]})
    assert json.loads(builder.finish().split(b"data: ")[-1])["response"] == whole
    assert [(item["type"], item["status"]) for item in whole["output"]] == items
