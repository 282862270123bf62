"""Telling a prompt that is longer than the model's context from every other refusal of an engine."""

import re
from collections.abc import Iterator

#: How engines word it: this platform's two and OpenAI's API by the code, vLLM alone and other servers in the message.
_CODE = "context_length_exceeded"
_WORDS = re.compile(
    r"context_length_exceeded|maximum context length|longer than the maximum model length|max_model_len"
    r"|the model's context|exceeds? the (?:available )?context"
)
_REFUSED = 400


def is_too_long(status: int, body: str) -> bool:
    """Whether an HTTP answer refuses a prompt for its length."""
    return status == _REFUSED and _WORDS.search(body) is not None


def outgrew_context(error: BaseException) -> bool:
    """Whether ``error``, anything that it came from or any part of it is an engine's refusal of a too long prompt.

    Agent frameworks wrap the client's exception in their own, and groups of tasks in groups.
    """
    return any(_says_so(link) for link in _links(error))


def _says_so(error: BaseException) -> bool:
    if getattr(error, "code", None) == _CODE:
        return True
    status = getattr(error, "status_code", None)  # openai.APIStatusError and what is made like it
    return isinstance(status, int) and is_too_long(status, str(error))


def _links(error: BaseException) -> Iterator[BaseException]:
    """The exception, what it was raised from, and the parts of groups."""
    waiting, seen = [error], set[int]()
    while waiting:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [cause for cause in (link.__cause__, link.__context__) if cause is not None]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
