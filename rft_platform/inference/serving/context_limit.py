"""Recognise an engine's refusal of a prompt that is longer than the model's context."""

import re

#: Error code of this platform's engines and OpenAI's API; plain vLLM and other servers say it in the message.
CODE = "context_length_exceeded"
_WORDS = re.compile(
    rf"{CODE}|maximum context length|longer than the maximum model length|max_model_len|the model's context"
    r"|exceeds? the (?:available )?context"
)
_REFUSED = 400


def says_too_long(message: str) -> bool:
    """Whether an error message says that the prompt is too long."""
    return _WORDS.search(message) is not None


def is_too_long(status: int, body: str) -> bool:
    """Whether an HTTP response refuses a prompt because of its length."""
    return status == _REFUSED and says_too_long(body)
