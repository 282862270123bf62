"""Bodies that a broken or hostile client sends: each is the caller's error, never the server's."""

import json
from typing import Any

QUESTION = [{"role": "user", "content": "2+2?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_DEEP = 100_000


def called(calls: Any) -> dict[str, Any]:
    """A conversation whose assistant has made ``calls``."""
    return {"messages": [*QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *QUESTION]}


#: Name -> fields of a chat request; all are answered 400 (404 for the model).
REFUSED_CHATS: dict[str, dict[str, Any]] = {
    "temperature beyond float32": {"temperature": 1e308},
    "temperature of nearly 0": {"temperature": 1e-300},
    "temperature as a list": {"temperature": [1]},
    "top_k beyond int32": {"top_k": 1e30},
    "top_k of 2**31": {"top_k": 2**31},
    "seed beyond int64": {"seed": 2**63},
    "n of a million": {"n": 1_000_000},
    "n as text": {"n": "two"},
    "max_tokens as text": {"max_tokens": "abc"},
    "max_tokens as a fraction": {"max_tokens": 1.5},
    "a thousand stops": {"stop": ["x"] * 1000},
    "a stop of a megabyte": {"stop": "x" * (1 << 20)},
    "stop as a number": {"stop": 5},
    "stream as text": {"stream": "perhaps"},
    "tool_calls as text": called("abc"),
    "tool_calls of numbers": called([5]),
    "a tool call without function": called([{"id": "a"}]),
    "a tool call whose function is text": called([{"function": "f"}]),
    "arguments as a number": called([{"function": {"name": "f", "arguments": 5}}]),
    "tools as text": {"tools": "abc"},
    "a tool whose function is text": {"tools": [{"type": "function", "function": "f"}]},
    "a tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "a tool of another type": {"tools": [{"type": "retrieval"}]},
    "tool_choice without a function": {"tools": [TOOL], "tool_choice": {"type": "function"}},
    "tool_choice whose function is text": {"tools": [TOOL], "tool_choice": {"type": "function", "function": "f"}},
    "tool_choice of another word": {"tools": [TOOL], "tool_choice": "sometimes"},
    "required without tools": {"tool_choice": "required"},
    "required with an empty list": {"tool_choice": "required", "tools": []},
    "an unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "a role of another type": {"messages": [{"role": 5, "content": "x"}]},
    "messages as text": {"messages": "2+2?"},
    "messages of numbers": {"messages": [5]},
    "content as a number": {"messages": [{"role": "user", "content": 5}]},
    "content of unknown parts": {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
    "content of parts without type": {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
    "the variable messages": {"chat_template_kwargs": {"messages": []}},
    "the variable self": {"chat_template_kwargs": {"self": 1}},
    "the variable add_generation_prompt": {"chat_template_kwargs": {"add_generation_prompt": False}},
    "the variable chat_template": {"chat_template_kwargs": {"chat_template": "x"}},
    "variables as text": {"chat_template_kwargs": "x"},
    "a model of another type": {"model": 5},
    "an unknown model": {"model": "gpt-none"},
    "top_logprobs of a thousand": {"logprobs": True, "top_logprobs": 1000},
    "logit_bias": {"logit_bias": {"5": 1}},
    "stream_options as text": {"stream_options": "x"},
}
#: Name -> JSON text of a chat request; all are answered 400.
REFUSED_TEXTS: dict[str, str] = {
    "deep lists": "[" * _DEEP + "]" * _DEEP,
    "deep objects": '{"messages":' * _DEEP + "1" + "}" * _DEEP,
    "deep metadata": f'{{"messages": {json.dumps(QUESTION)}, "metadata": {"[" * 5000 + "]" * 5000}}}',
    "infinity": f'{{"messages": {json.dumps(QUESTION)}, "temperature": Infinity}}',
    "not a number": f'{{"messages": {json.dumps(QUESTION)}, "temperature": NaN}}',
    "max_tokens of 1e400": f'{{"messages": {json.dumps(QUESTION)}, "max_tokens": 1e400}}',
    "n of 1e400": f'{{"messages": {json.dumps(QUESTION)}, "n": 1e400}}',
    "a number of 10,000 digits": f'{{"messages": {json.dumps(QUESTION)}, "seed": {"9" * 10_000}}}',
    "a list": "[]",
    "text": '"x"',
    "nothing": "",
    "half an object": '{"messages": ',
    "bytes that are no text": "\x00\x01",
}
#: Fields of a chat request that a client may well send: all are answered 200.
ACCEPTED_CHATS: dict[str, dict[str, Any]] = {
    "deep arguments": called([{"id": "a", "function": {"name": "f", "arguments": "[" * _DEEP}}]),
    "arguments that are no JSON": called([{"id": "a", "function": {"name": "f", "arguments": "{"}}]),
    "max_tokens of a googol": {"max_tokens": 10**100},
    "a number as text": {"temperature": "0.5"},
    "an unknown field": {"metadata": {"a": [1]}},
}
#: JSON text whose half surrogate pairs become U+FFFD: in content, arguments, a tool and a variable of the template.
HALF_PAIRS = (
    r'{"messages": [{"role": "user", "content": "a\ud83d"}, {"role": "assistant", "content": null, "tool_calls": '
    r'[{"id": "\ude00", "function": {"name": "f", "arguments": "{\"x\": \"\ud83d\"}"}}]}, '
    r'{"role": "user", "content": "\ud83d\ude00"}], "max_tokens": 1, '
    r'"tools": [{"type": "function", "function": {"name": "f", "description": "\udfff"}}]}'
)
