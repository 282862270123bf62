"""Messages as clients send them, templates given by file or text."""

import json
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.inference.vllm_engine.openai_wire import checked_request
from rft_platform.openai_api.messages import normalised
from rft_platform.openai_api.schema import CHAT
from rft_platform.openai_api.templates import ChatTemplate, load_template
from rft_platform.openai_api.tokenizer import PolicyTokenizer, end_ids

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PolicyTokenizer:
    return PolicyTokenizer(tiny_model)


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), ([], ""), ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "ab")],
)
def test_content_becomes_text(content: object, text: str) -> None:
    assert normalised({"role": "user", "content": content})["content"] == text
    assert normalised({"role": "user"})["content"] == ""


def test_both_engines_read_developer_as_system() -> None:
    sent, known = ({"role": role, "content": "rules"} for role in ("developer", "system"))
    assert normalised(sent) == normalised(known) == known
    passed_on = checked_request(CHAT, json.dumps({"messages": [sent]}).encode(), max_model_len=64)
    assert json.loads(passed_on.body)["messages"] == [known]
    assert sent["role"] == "developer"  # the caller's own is not touched


@pytest.mark.parametrize("content", [5, {"type": "text"}, ["a"], [{"type": "image_url"}]])
def test_other_content_is_refused(content: object) -> None:
    with pytest.raises(UserError, match="content"):
        normalised({"role": "user", "content": content})


def test_arguments_become_an_object_where_they_are_json() -> None:
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', "", "not json")]
    result = normalised({"role": "assistant", "tool_calls": calls})
    assert [call["function"]["arguments"] for call in result["tool_calls"]] == [{"a": 1}, {}, "not json"]
    assert calls[0]["function"]["arguments"] == '{"a": 1}'  # the caller's own is not touched


@pytest.mark.slow
def test_own_template_options_and_digest(tokenizer: PolicyTokenizer) -> None:
    own, default = ChatTemplate(tokenizer, TEMPLATE), ChatTemplate(tokenizer)
    assert own.text([{"role": "user", "content": "x"}], options={"mood": "!"}) == "[user]x!"
    assert own.digest != default.digest == ChatTemplate(tokenizer).digest


@pytest.mark.parametrize(
    "name", ["messages", "self", "tools", "add_generation_prompt", "chat_template", "conversations"]
)
def test_reserved_variables_are_refused(tokenizer: PolicyTokenizer, name: str) -> None:
    with pytest.raises(UserError, match=name):
        ChatTemplate(tokenizer).text([{"role": "user", "content": "x"}], options={name: "y"})


@pytest.mark.parametrize("calls", ["abc", [5], [{"function": "f"}], {"a": 1}])
def test_tool_calls_of_other_types_are_refused(calls: object) -> None:
    with pytest.raises(UserError, match=r"tool call|tool_calls"):
        normalised({"role": "assistant", "tool_calls": calls})


def test_arguments_that_are_nested_too_deeply_stay_text() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    assert normalised({"role": "assistant", "tool_calls": [call]})["tool_calls"] == [call]


def test_a_template_that_refuses_is_the_callers_error(tokenizer: PolicyTokenizer) -> None:
    strict = ChatTemplate(tokenizer, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        strict.text([{"role": "user", "content": "x"}])


def test_load_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    assert load_template(str(file)) == TEMPLATE == load_template(TEMPLATE)
    assert load_template(None) is None
    with pytest.raises(UserError, match="nowhere"):
        load_template("nowhere.jinja")


def test_token_texts_and_round_trip(tokenizer: PolicyTokenizer) -> None:
    (ids,) = tokenizer.encode(["<|im_start|>12 é"])
    assert tokenizer.decode(ids) == "12 é"
    assert tokenizer.decode_many([ids, ids[1:]]) == ["12 é"] * 2
    assert tokenizer.token_texts(ids[:3]) == ["<|im_start|>", "1", "2"]


@pytest.mark.parametrize(("given", "expected"), [("5", [2, 5]), ("[5, 7]", [2, 5, 7]), ("null", [2])])
def test_several_end_ids(tmp_path: Path, given: str, expected: list[int]) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {given}}}')
    assert end_ids(tmp_path, 2) == expected
