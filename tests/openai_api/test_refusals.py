"""Both engines refuse a field in the same words: FastAPI checks the bodies of one, the platform those of the other."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from rft_platform.common.errors import UserError
from rft_platform.inference.serving.request_body import MAX_BODY_BYTES, parsing_route
from rft_platform.inference.vllm_engine.openai_wire import checked_request
from rft_platform.openai_api.errors import ApiError, describe, install, is_too_long
from rft_platform.openai_api.schema import CHAT, COMPLETIONS, ChatBody, CompletionBody
from rft_platform.openai_api.tokenizer import check_prompt

QUESTION = [{"role": "user", "content": "2+2?"}]


async def embedded(path: str, body: Any) -> tuple[int, dict[str, Any]]:
    """The refusal by routes like those of the embedded engine."""
    app = FastAPI()
    app.router.route_class = parsing_route(MAX_BODY_BYTES)
    install(app)

    @app.post(CHAT)
    async def chat(body: ChatBody) -> None: ...

    @app.post(COMPLETIONS)
    async def completions(body: CompletionBody) -> None: ...

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        answer = await client.post(path, json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": []}, "messages: "),
        (CHAT, {"messages": [{"role": "wizard"}]}, "messages.0.role: "),
        (CHAT, {"messages": QUESTION, "temperature": 1e-9}, "temperature: expected 0 (greedy) or at least 1e-05"),
        (CHAT, {"messages": QUESTION, "min_p": 0.1}, "min_p is not supported by this engine"),
        (COMPLETIONS, {"prompt": []}, "prompt: expected a text, a list of token ids, or a list of these"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 1000}, "prompt: 3 prompts with n=1000 are 3000 sequences"),
    ],
)
async def test_both_engines_refuse_a_field_in_the_same_words(path: str, body: Any, words: str) -> None:
    refusal = await embedded(path, body)
    with pytest.raises(ApiError) as caught:
        checked_request(path, json.dumps(body).encode(), max_model_len=64)
    assert describe(caught.value) == refusal
    status, answer = refusal
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_value")
    assert error["message"].startswith(words)


@pytest.mark.parametrize(("ids", "too_long"), [([], False), ([1] * 8, True)])
def test_an_empty_prompt_is_not_too_long(ids: list[int], too_long: bool) -> None:
    with pytest.raises(UserError) as refused:
        check_prompt(ids, 8, 10)
    status, body = describe(refused.value)
    assert (status, is_too_long(status, json.dumps(body))) == (400, too_long)
    assert too_long or "the prompt is empty" in str(refused.value)
