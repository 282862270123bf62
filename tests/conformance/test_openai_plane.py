"""The OpenAI plane, through OpenAI's own clients."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams

from .conftest import MAX_MODEL_LEN, bearer, close, same

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the end of an answer that was cut within a character
QUESTION = [{"role": "user", "content": "What is 12+7?"}]


def test_chat_gives_what_the_token_plane_gives(engine: EngineClient, client: Any, model_name: str) -> None:
    prompts = engine.render([QUESTION])
    (expected,) = engine.generate(prompts, SamplingParams(24, n=3, seed=4))
    answer = client.chat.completions.create(
        model=model_name,
        messages=QUESTION,
        max_tokens=24,
        n=3,
        seed=4,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    assert answer.prompt_token_ids == prompts[0]
    texts = engine.decode([completion.token_ids for completion in expected.completions])
    for choice, completion, text in zip(answer.choices, expected.completions, texts, strict=True):
        assert same([choice.token_ids], [completion.token_ids]) and choice.message.role == "assistant"
        if choice.token_ids == completion.token_ids:
            assert close([token.logprob for token in choice.logprobs.content], completion.logprobs, 1e-5)
            assert choice.message.content in (text, text.rstrip(INCOMPLETE))
            assert choice.finish_reason == completion.finish_reason
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)
    assert answer.usage.prompt_tokens == len(prompts[0])
    assert answer.policy_version == expected.policy_version


def test_ids_are_unique_and_ids_and_logprobs_are_given_only_on_request(client: Any, model_name: str) -> None:
    answers = [client.chat.completions.create(model=model_name, messages=QUESTION, max_tokens=2) for _ in range(3)]
    assert len({answer.id for answer in answers}) == 3 and all(answer.id for answer in answers)
    dumped = answers[0].model_dump()
    assert dumped["choices"][0]["logprobs"] is None
    assert "prompt_token_ids" not in dumped and "token_ids" not in dumped["choices"][0]


def test_top_logprobs_are_sorted_and_hold_the_likeliest(client: Any, model_name: str) -> None:
    answer = client.chat.completions.create(
        model=model_name, messages=QUESTION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=4
    )
    for token in answer.choices[0].logprobs.content:
        values = [other.logprob for other in token.top_logprobs]
        assert len(values) == 4 and values == sorted(values, reverse=True)
        assert token.top_logprobs[0].token == token.token and abs(values[0] - token.logprob) < 1e-5


def test_messages_as_clients_really_send_them(engine: EngineClient, client: Any, model_name: str) -> None:
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "12+7?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "again"},
    ]
    odd: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "12+"}, {"type": "text", "text": "7?"}]},
        {"role": "assistant"},
        {"role": "user", "content": "again", "name": "bob"},
    ]
    answer = client.chat.completions.create(
        model=model_name, messages=odd, max_completion_tokens=2, extra_body={"return_token_ids": True}
    )
    assert answer.prompt_token_ids == engine.render([plain])[0]


def test_template_options_reach_the_template(client: Any, model_name: str) -> None:
    answers = [
        client.chat.completions.create(
            model=model_name, messages=QUESTION, max_tokens=2, extra_body={"return_token_ids": True, **extra}
        )
        for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
    ]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids  # this template has no such option


def test_several_greedy_answers_are_equal_or_refused(client: Any, model_name: str) -> None:
    request: dict[str, Any] = {"model": model_name, "messages": QUESTION, "max_tokens": 6, "temperature": 0}
    one = client.chat.completions.create(**request).choices[0].message.content
    try:
        several = client.chat.completions.create(**request, n=3)
    except openai.BadRequestError as refusal:
        assert "n must be 1" in str(refusal)
    else:
        assert [choice.message.content for choice in several.choices] == [one] * 3


def test_stop_strings_are_cut_off(client: Any, model_name: str) -> None:
    def ask(**extra: Any) -> Any:
        return client.chat.completions.create(model=model_name, messages=QUESTION, max_tokens=60, seed=8, n=8, **extra)

    texts = [choice.message.content for choice in ask().choices]
    text = max(texts, key=len)
    place = next(i for i in range(2, len(text)) if text[i : i + 2].isascii() and len(text[i : i + 2]) == 2)
    stop = text[place : place + 2]
    stopped = ask(stop=["never ever", stop]).choices[texts.index(text)]
    assert stopped.message.content == text[: text.index(stop)] and stopped.finish_reason == "stop"


def test_completions_take_text_ids_and_several_of_them(engine: EngineClient, client: Any, model_name: str) -> None:
    ids = engine.render([QUESTION])
    answer = client.completions.create(
        model=model_name,
        prompt=[*ids, *ids],
        max_tokens=5,
        n=2,
        seed=3,
        logprobs=0,
        extra_body={"return_token_ids": True},
    )
    expected = [c for g in engine.generate([*ids, *ids], SamplingParams(5, n=2, seed=3)) for c in g.completions]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert same([choice.token_ids for choice in answer.choices], [completion.token_ids for completion in expected])
    assert all(choice.prompt_token_ids == ids[0] for choice in answer.choices)
    if answer.choices[1].token_ids == expected[1].token_ids:
        assert close(answer.choices[1].logprobs.token_logprobs, expected[1].logprobs, 1e-5)
    text = client.completions.create(model=model_name, prompt="12+7=", max_tokens=3)
    assert text.object == "text_completion" and text.usage.completion_tokens <= 3


def test_models_lists_the_name(client: Any, model_name: str) -> None:
    assert model_name in [model.id for model in client.models.list()]


def test_version_is_on_every_answer(engine: EngineClient, model_name: str) -> None:
    with httpx.Client(trust_env=False, headers=bearer(engine)) as http:
        answers = [
            http.get(f"{engine.base_url}/models"),
            http.post(f"{engine.base_url}/chat/completions", json={"messages": QUESTION, "max_tokens": 1}),
            http.post(
                f"{engine.base_url}/chat/completions", json={"messages": QUESTION, "max_tokens": 1, "stream": True}
            ),
            http.post(f"{engine.base_url}/chat/completions", json={"model": "other", "messages": QUESTION}),
            http.get(engine.base_url.removesuffix("/v1") + "/health"),
        ]
    assert [answer.headers["x-policy-version"] for answer in answers] == ["0"] * 5


async def test_64_concurrent_requests(engine: EngineClient, model_name: str) -> None:
    async with openai.AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0) as client:
        answers: list[Any] = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=model_name,
                    messages=[{"role": "user", "content": f"{i}+{i}=" * (1 + i % 3)}],
                    max_tokens=4 + i % 9,
                    seed=i,
                    logprobs=True,
                    extra_body={"return_token_ids": True},
                )
                for i in range(64)
            )
        )
    together, alone = [], []
    for i, answer in enumerate(answers):
        (generation,) = engine.generate([answer.prompt_token_ids], SamplingParams(4 + i % 9, seed=i))
        (choice,), (done,) = answer.choices, generation.completions
        together.append(choice.token_ids)
        alone.append(done.token_ids)
        if choice.token_ids == done.token_ids:
            assert close([t.logprob for t in choice.logprobs.content], done.logprobs, 1e-5)
    assert same(together, alone)
    assert len({answer.id for answer in answers}) == 64


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({"messages": [{"role": "user", "content": "1" * MAX_MODEL_LEN}]}, 400, "context_length_exceeded", "tokens"),
        ({"messages": QUESTION, "model": "gpt-none"}, 404, "model_not_found", "gpt-none"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({}, 400, "invalid_value", "messages"),
        ({"messages": [{"content": "no role"}]}, 400, "invalid_value", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "invalid_value", "text parts"),
        ({"messages": QUESTION, "temperature": -1}, 400, "invalid_value", "temperature"),
        ({"messages": QUESTION, "top_p": 0}, 400, "invalid_value", "top_p"),
        ({"messages": QUESTION, "n": 0}, 400, "invalid_value", "n"),
        ({"messages": QUESTION, "response_format": {"type": "json_schema"}}, 400, "invalid_value", "json_schema"),
        ({"messages": QUESTION, "frequency_penalty": 0.5}, 400, "invalid_value", "frequency_penalty"),
        ({"messages": QUESTION, "tool_choice": {"function": {"name": "f"}}}, 400, "invalid_value", "'f'"),
    ],
)
def test_errors_are_openais(engine: EngineClient, body: dict[str, Any], status: int, code: str, words: str) -> None:
    answer = httpx.post(f"{engine.base_url}/chat/completions", json=body, headers=bearer(engine), trust_env=False)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert words in error["message"]


def test_a_body_that_is_not_json_and_an_unknown_route(engine: EngineClient) -> None:
    broken = httpx.post(
        f"{engine.base_url}/chat/completions",
        content="{",
        headers={"content-type": "application/json", **bearer(engine)},
        trust_env=False,
    )
    assert broken.status_code == 400 and broken.json()["error"]["message"]
    unknown = httpx.post(f"{engine.base_url}/embeddings", json={}, headers=bearer(engine), trust_env=False)
    assert unknown.status_code == 404 and unknown.json()["error"]["message"]


def test_neutral_and_unknown_fields_are_accepted(client: Any, model_name: str) -> None:
    extra = {"response_format": {"type": "text"}, "min_p": 0, "metadata": {"a": "b"}, "parallel_tool_calls": True}
    answer = client.chat.completions.create(
        model=model_name, messages=QUESTION, max_tokens=1, presence_penalty=0, user="u", extra_body=extra
    )
    assert answer.choices
