"""Thoughts are told from the answer, in pieces as in a whole; the template is told whether the model is to think."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.config.home import Home
from rft_platform.inference.interface import PolicyEngine
from rft_platform.inference.vllm_engine.openai_wire import CHAT, checked_request, stamped_answer, stamped_events
from rft_platform.openai_api.parsers import AnswerText, OutputParser

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
# A template that does what those of thinking models do: it opens the thoughts unless it is told not to.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)


def by_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def read(text: str, prompt: str, sizes: list[int], tools: bool = False) -> tuple[str, str, int]:
    """(thoughts, answer, calls) of ``text`` that arrives in pieces."""
    begun = "<think>" if prompt.rstrip().endswith("<think>") else ""
    answer = AnswerText(by_bytes, (), OutputParser(begun, reasoning=True, tools=tools))
    ids, thoughts, shown, calls, position, turn = list(text.encode()), "", "", 0, 0, 0
    while position < len(ids):
        end = position + sizes[turn % len(sizes)]
        thought, piece, found = answer.feed(ids[position:end], last=end >= len(ids))
        thoughts, shown, calls = thoughts + thought, shown + piece, calls + len(found)
        position, turn = end, turn + 1
    return thoughts, shown, calls


@pytest.mark.parametrize(
    ("prompt", "text", "thoughts", "answer"),
    [
        ("user: hi\n<think>\n", "so 2\n</think>\n\n4", "so 2\n", "\n\n4"),
        ("user: hi\n", "<think>so 2</think>4", "so 2", "4"),
        ("user: hi\n", "\n<think>so 2</think>4", "so 2", "4"),
        ("user: hi\n<think>\n", "it never ends", "it never ends", ""),
        ("user: hi\n", "4", "", "4"),
        ("user: hi\n", "4 <think> 5", "", "4 <think> 5"),  # in the middle of an answer it is text
        ("user: hi\n", "<thi", "", "<thi"),
        ("user: hi\n<think>\n", "a </thi b</think>c</think>", "a </thi b", "c</think>"),
    ],
)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_thoughts_end_at_the_tag(prompt: str, text: str, thoughts: str, answer: str, sizes: list[int]) -> None:
    assert read(text, prompt, sizes) == (thoughts, answer, 0)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_call_that_is_only_thought_of_is_not_made(sizes: list[int]) -> None:
    thought = f"I could {CALL}"
    assert read(f"{thought}</think>\n\n{CALL}", "<think>", sizes, tools=True) == (thought, "", 1)


@pytest.fixture(scope="module")
def thinking(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyEngine]:
    from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine

    home = tmp_path_factory.mktemp("thinking")
    with find_or_start_engine(
        tiny_model,
        Home(home).cluster,
        EngineSpec(
            dtype="float32",
            device="cpu",
            chat_template=TEMPLATE,
            enable_thinking=True,
            reasoning_parser="deepseek_r1",
        ),
    ) as engine:
        yield engine
        engine.shutdown()


def ask(engine: PolicyEngine, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 6, "seed": 3, **fields}
    answer = httpx.post(
        f"{engine.base_url}/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {engine.api_key}"},
        timeout=60,
        trust_env=False,
    )
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def test_the_engine_thinks_unless_a_request_disables_it(thinking: PolicyEngine) -> None:
    message = ask(thinking)["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    plain = ask(thinking, chat_template_kwargs={"enable_thinking": False})["choices"][0]["message"]
    assert plain["content"]
    assert "reasoning_content" not in plain


def test_batches_are_rendered_as_conversations_are(thinking: PolicyEngine) -> None:
    conversation = [{"role": "user", "content": "1+1="}]
    asked = ask(thinking, return_token_ids=True)["prompt_token_ids"]
    assert thinking.render([conversation]) == [asked]


def test_a_streamed_answer_equals_a_whole_one(thinking: PolicyEngine) -> None:
    import openai

    whole = ask(thinking, return_token_ids=True)["choices"][0]
    client = openai.OpenAI(base_url=thinking.base_url, api_key=thinking.api_key, max_retries=0)
    messages: Any = [{"role": "user", "content": "1+1="}]
    with (
        client,
        client.chat.completions.create(
            model=thinking.status().model_path, messages=messages, max_tokens=6, seed=3, stream=True
        ) as stream,
    ):
        deltas = [chunk.choices[0].delta for chunk in stream]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == whole["message"]["reasoning_content"]
    assert not any(delta.content for delta in deltas)


def test_vllm_requests_and_answers_use_the_same_fields() -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    thinks = {"enable_thinking": True}
    assert b'"chat_template_kwargs": {"enable_thinking": true}' in checked_request(CHAT, body, 64, thinks).body
    own = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": false}}'
    assert b'"chat_template_kwargs": {"enable_thinking": false}' in checked_request(CHAT, own, 64, thinks).body
    assert b"chat_template_kwargs" not in checked_request(CHAT, body, 64, {}).body
    answer = b'{"choices": [{"message": {"content": "4", "reasoning": "so 2"}}]}'
    assert b'"reasoning_content": "so 2"' in stamped_answer(answer, 3)
    events = b'data: {"choices": [{"delta": {"reasoning": "so"}}]}\n\ndata: {"choices": [{"delta": {}}]}\n\n'
    stamped = stamped_events(events, 3)
    assert b'"reasoning_content": "so"' in stamped
    assert stamped.count(b'"policy_version": 3') == 2
