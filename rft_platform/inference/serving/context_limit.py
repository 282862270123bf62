"""Telling a prompt that is longer than the model's context from every other refusal of an engine."""

import re

#: How engines word it: this platform's two and OpenAI's API by the code, vLLM alone and other servers in the message.
CODE = "context_length_exceeded"
_WORDS = re.compile(
    rf"{CODE}|maximum context length|longer than the maximum model length|max_model_len|the model's context"
    r"|exceeds? the (?:available )?context"
)
_REFUSED = 400


def says_too_long(message: str) -> bool:
    """Whether the text of a refusal says that the prompt is too long."""
    return _WORDS.search(message) is not None


def is_too_long(status: int, body: str) -> bool:
    """Whether an HTTP answer refuses a prompt for its length."""
    return status == _REFUSED and says_too_long(body)
