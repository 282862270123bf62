"""Length of prompts: the checks of both engines, and how a caller recognises the refusal of a too long prompt.

Both engines use the same checks, so their refusals are the same.
"""

import re
from collections.abc import Sequence

from rft_platform.common.errors import UserError

#: Error code of this platform's engines and of OpenAI's API. Other servers report a too long prompt in the message
#: only.
CODE = "context_length_exceeded"
_WORDS = re.compile(
    rf"{CODE}|maximum context length|longer than the maximum model length|max_model_len|the model's context"
    r"|exceeds? the (?:available )?context"
)
_REFUSED = 400
MAX_CHARACTERS_A_TOKEN = 64  # on average over a prompt; tokens have about 4, long runs of spaces up to 128


class ContextLengthError(UserError):
    """The prompt is longer than the model's context."""


def check_text(text: str, max_model_len: int) -> None:
    """Raise ContextLengthError, before tokenising, for a text that no tokenizer could fit into the context."""
    limit = MAX_CHARACTERS_A_TOKEN * max_model_len
    if len(text) > limit:
        raise ContextLengthError(
            f"the prompt has {len(text)} characters; at most {limit} can fit the model's context of "
            f"{max_model_len} tokens"
        )


def check_ids(ids: Sequence[int], limit: int, max_model_len: int, vocabulary: int, why: str = "") -> None:
    """Raise an error unless ``ids`` has 1 to ``limit`` tokens, each in [0, ``vocabulary``)."""
    if not 0 < len(ids) <= limit:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens; between 1 and {limit} fit the model's context of "
            f"{max_model_len} tokens{why}"
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise UserError(f"token ids must lie between 0 and {vocabulary - 1}: got {min(ids)} to {max(ids)}")


def check_prompt(ids: Sequence[int], max_model_len: int, vocabulary: int) -> None:
    """Check ``ids`` as ``check_ids`` does; the prompt must also leave room to sample at least one token."""
    check_ids(ids, max_model_len - 1, max_model_len, vocabulary, "; nothing could be sampled after it")


def says_too_long(message: str) -> bool:
    """Whether an error message says that the prompt is too long."""
    return _WORDS.search(message) is not None


def is_too_long(status: int, body: str) -> bool:
    """Whether an HTTP response refuses a prompt because of its length."""
    return status == _REFUSED and says_too_long(body)
