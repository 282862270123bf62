"""A client's bad value is its own error on every engine, and leaves the connection and the engine as they were."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.pool.engine_pool import EnginePool

from .conftest import bearer
from .hostile import ACCEPTED_CHATS, HALF_PAIRS, QUESTION, REFUSED_CHATS, REFUSED_TEXTS

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http(engine: EngineClient) -> Iterator[httpx.Client]:
    """One connection for all requests of this file: an error must not break the next one."""
    limits = httpx.Limits(max_connections=1)
    base = engine.base_url.removesuffix("/v1")
    with httpx.Client(base_url=base, headers=bearer(engine), limits=limits, trust_env=False, timeout=60) as client:
        yield client


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1, **fields})


def assert_refused(answer: httpx.Response, status: int = 400) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"] and error["code"]


@pytest.mark.parametrize("fields", REFUSED_CHATS.values(), ids=REFUSED_CHATS)
def test_a_bad_value_is_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert_refused(chat(http, **fields), 404 if fields.get("model") == "gpt-none" else 400)
    assert chat(http).status_code == 200


@pytest.mark.parametrize("text", REFUSED_TEXTS.values(), ids=REFUSED_TEXTS)
def test_a_bad_text_is_refused(http: httpx.Client, text: str) -> None:
    assert_refused(http.post("/v1/chat/completions", content=text, headers=JSON))
    assert_refused(http.post("/v1/completions", content=text, headers=JSON))


@pytest.mark.parametrize("fields", ACCEPTED_CHATS.values(), ids=ACCEPTED_CHATS)
def test_an_odd_value_is_accepted(engine: EngineClient, http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = chat(http, **fields)
    if answer.status_code != 200:  # vLLM wants arguments that are JSON; and some of these are long
        assert_refused(answer)
        code = answer.json()["error"]["code"]
        assert code == "context_length_exceeded" or engine.status().engine.startswith("vllm"), answer.text


def test_half_a_surrogate_pair_becomes_a_replacement_character(engine: EngineClient, http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", content=HALF_PAIRS, headers=JSON)
    assert answer.status_code == 200, answer.text
    text = (
        f'{{"messages": [{{"role": "user", "content": "a{chr(92)}ud83d"}}], "max_tokens": 1, "return_token_ids": true}}'
    )
    ids = http.post("/v1/chat/completions", content=text, headers=JSON).json()["prompt_token_ids"]
    assert ids == engine.render([[{"role": "user", "content": "a\ufffd"}]])[0]


@pytest.mark.parametrize(
    ("prompt", "n"), [(["x"] * 2049, 1), (["x"] * 100, 1000), ([], 1), ([[]], 1), ([-1], 1), ([[10**30]], 1), (5, 1)]
)
def test_prompts_are_bounded(http: httpx.Client, prompt: Any, n: int) -> None:
    assert_refused(http.post("/v1/completions", json={"prompt": prompt, "n": n, "max_tokens": 1}))


def test_a_text_far_beyond_the_context_is_refused_at_once(http: httpx.Client) -> None:
    answer = chat(http, messages=[{"role": "user", "content": "x " * (4 << 20)}])
    assert_refused(answer)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.elapsed.total_seconds() < 10  # tokenising it took 8


def test_a_model_is_retrieved_by_its_name(engine: EngineClient, http: httpx.Client) -> None:
    for name in [model["id"] for model in http.get("/v1/models").json()["data"]]:
        assert http.get(f"/v1/models/{name}").json()["id"] == name
    assert_refused(http.get("/v1/models/gpt-none"), 404)


@pytest.mark.parametrize(
    ("prompts", "sampling"),
    [
        ([[1.5, 2]], {}),
        ([["a"]], {}),
        ([[1, 2]], {"max_tokens": 0}),
        ([[1, 2]], {"max_tokens": 1.5}),
        ([[1, 2]], {"n": 0}),
        ([[1, 2]], {"temperature": -1}),
        ([[1, 2]], {"top_p": 0}),
        ([[1, 2]], {"top_k": -2}),
        ([[1, 2]], {"seed": "x"}),
    ],
)
def test_a_batch_that_cannot_be_sampled_is_refused(
    engine: EngineClient, http: httpx.Client, prompts: list[Any], sampling: dict[str, Any]
) -> None:
    body = {"prompts": prompts, "sampling": {"max_tokens": 2, **sampling}}
    process = engine.replicas.serving()[0].client if isinstance(engine, EnginePool) else engine
    lease = {"Authorization": f"Bearer {process.address.token}"}
    assert_refused(http.post(f"{process.url}/engine/generate", json=body, headers=lease))


def test_a_batch_without_prompts_has_no_answers(engine: EngineClient) -> None:
    assert engine.generate([], SamplingParams(4)) == []
