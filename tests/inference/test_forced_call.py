"""A call that must be made begins in the prompt, so that what is sampled after it stays the policy's own."""

from typing import Any

import httpx
import pytest

from rft_platform.inference.interface import PolicyEngine

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("choice", "beginning"),
    [
        ("required", "<tool_call>\n"),
        ({"type": "function", "function": {"name": "calculator"}}, '<tool_call>\n{"name": "calculator", "arguments": '),
    ],
)
def test_a_forced_call_begins_in_the_prompt(policy_engine: PolicyEngine, choice: Any, beginning: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 12*7?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 1,
        "return_token_ids": True,
    }
    key = {"Authorization": f"Bearer {policy_engine.api_key}"}
    answer = httpx.post(f"{policy_engine.base_url}/chat/completions", json=body, headers=key, trust_env=False).json()
    assert policy_engine.decode([answer["prompt_token_ids"]])[0].endswith(beginning)
