"""A streamed answer says what the whole one says."""

from typing import Any

import openai
import pytest

from rft_platform.inference.client import EngineClient

QUESTION = [{"role": "user", "content": "Count."}]


@pytest.mark.parametrize("extra", [{}, {"stop": ["e", "1", "st"]}, {"temperature": 0.0, "n": 1}, {"top_p": 0.5}])
def test_stream_equals_whole(client: Any, model_name: str, extra: dict[str, Any]) -> None:
    request: dict[str, Any] = {
        "model": model_name, "messages": QUESTION, "max_tokens": 40, "n": 3, "seed": 6,
        "logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}, **extra,
    }  # fmt: skip
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.policy_version == 0 for chunk in chunks)
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    for choice in whole.choices:
        mine = [piece for piece in pieces if piece.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in mine) == choice.message.content
        ids = [token for piece in mine for token in getattr(piece, "token_ids", [])]
        assert ids == choice.token_ids
        logprobs = [token for piece in mine if piece.logprobs for token in piece.logprobs.content]
        assert [t.token for t in logprobs] == [t.token for t in choice.logprobs.content]
        assert [len(t.top_logprobs) for t in logprobs] == [2] * len(ids)
        assert [piece.finish_reason for piece in mine if piece.finish_reason] == [choice.finish_reason]


def test_streamed_completions(client: Any, model_name: str) -> None:
    request: dict[str, Any] = {"model": model_name, "prompt": ["1+1=", "2+2="], "max_tokens": 9, "seed": 6}
    whole = client.completions.create(**request)
    pieces = [chunk.choices[0] for chunk in client.completions.create(**request, stream=True)]
    for choice in whole.choices:
        mine = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason


def test_a_refused_stream_has_its_status(client: Any, model_name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.chat.completions.create(model=model_name, messages=[{"role": "user", "content": "1" * 999}], stream=True)


def test_a_client_that_disconnects_ends_the_work(engine: EngineClient, client: Any, model_name: str) -> None:
    before = engine.metrics()["requests"]
    with client.chat.completions.create(model=model_name, messages=QUESTION, stream=True, n=4, seed=2) as stream:
        next(iter(stream))
    engine.pause("wait")  # returns once nothing runs any more
    engine.resume()
    assert engine.metrics()["requests"] == before + 1
