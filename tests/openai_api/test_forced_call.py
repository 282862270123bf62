"""A call that must be made begins in the prompt, so that what is sampled after it stays the policy's own."""

from typing import Any

import httpx
import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

from rft_platform.inference.interface import PolicyEngine
from rft_platform.openai_api.parsers import forced_beginning

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("choice", "beginning"),
    [
        ("required", "<tool_call>\n"),
        ({"type": "function", "function": {"name": "calculator"}}, '<tool_call>\n{"name": "calculator", "arguments":'),
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


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call>'
#: How GPT-2, Qwen and Llama split text before they merge: a space goes with what follows it.
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer that has seen tool calls, so that it has a token `` {"``."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, bytes_])
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<tool_call>", "</tool_call>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([CALL] * 50, trainer)
    return made


@pytest.mark.parametrize("tool", ["calculator", ""])
def test_the_kept_prefix_ends_at_a_token_boundary(tokenizer: tokenizers.Tokenizer, tool: str) -> None:
    begun = forced_beginning(tool)
    assert CALL.startswith(begun)
    whole, prefix = tokenizer.encode(CALL).ids, tokenizer.encode(begun).ids
    assert tokenizer.token_to_id('\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}{"') in whole  # `` {"`` is one token
    assert whole[: len(prefix)] == prefix  # what the model was trained on goes on from here
    assert tokenizer.decode(whole[len(prefix) :], skip_special_tokens=False) == CALL[len(begun) :]
