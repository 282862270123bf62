"""Requests and answers of vLLM's own OpenAI routes, made equal to those of every other engine.

Requests are checked by the schema that all engines share and their messages brought to one form; answers carry the
policy version, and errors OpenAI's codes.
"""

import json
import re
from typing import Any

from pydantic import ValidationError

from rft_platform.inference.serving.api_errors import ApiError, error_body
from rft_platform.inference.serving.chat_template import text_of
from rft_platform.inference.serving.openai_schema import ChatBody, CompletionBody, SamplingBody

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMAS: dict[str, type[SamplingBody]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}
EVENT = b"data: {"
UNASKED = ("prompt_token_ids", "token_ids")  # null where nobody asked for them
_TOO_LONG = re.compile(r"maximum context length|longer than the maximum model length|max_model_len|model's context")


def checked_request(path: str, body: bytes, template_options: dict[str, Any] | None = None) -> bytes:
    """The body to hand to vLLM; ApiError where a field is wrong or cannot be honoured.

    ``template_options`` are variables of the chat template where the request names none.
    """
    try:
        given = json.loads(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_value") from error
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_value")
    try:
        SCHEMAS[path].model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ApiError(400, f"{where or 'body'}: {first['msg']}", "invalid_value", where or None) from error
    kept = {name: value for name, value in given.items() if value is not None}
    if path == CHAT:
        kept["messages"] = [{**message, "content": text_of(message.get("content"))} for message in given["messages"]]
        if template_options:
            kept["chat_template_kwargs"] = {**template_options, **kept.get("chat_template_kwargs", {})}
    return json.dumps(kept).encode()


def stamped_answer(body: bytes, version: int) -> bytes:
    """A JSON answer with the policy version."""
    answer = json.loads(body)
    if not isinstance(answer, dict):
        return body
    for part in [answer, *(answer.get("choices") or [])]:
        for name in UNASKED:
            if name in part and part[name] is None:
                del part[name]
        _name_reasoning(part.get("message"))
    return json.dumps({**answer, "policy_version": version}).encode()


def stamped_events(data: bytes, version: int) -> bytes:
    """A piece of an event stream, each event with the policy version; vLLM sends whole events."""
    if EVENT not in data:
        return data
    stamp = f'data: {{"policy_version": {version}, '.encode()
    lines = data.split(b"\n")
    return b"\n".join(stamp + _event(line)[len(EVENT) :] if line.startswith(EVENT) else line for line in lines)


def _event(line: bytes) -> bytes:
    """A ``data:`` line whose deltas name the model's thoughts as every engine does."""
    if b'"reasoning"' not in line:
        return line
    chunk = json.loads(line[len(EVENT) - 1 :])
    for choice in chunk.get("choices") or []:
        _name_reasoning(choice.get("delta"))
    return b"data: " + json.dumps(chunk).encode()


def _name_reasoning(message: Any) -> None:
    """Thoughts stand in ``reasoning_content``, which agent frameworks read; newer versions say ``reasoning``."""
    if isinstance(message, dict) and message.get("reasoning") is not None:
        message.setdefault("reasoning_content", message["reasoning"])


def openai_error(status: int, body: bytes) -> dict[str, Any]:
    """vLLM's error answer with OpenAI's type and code."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = {"detail": body.decode(errors="replace")[:500]}
    given = answer.get("error", answer) if isinstance(answer, dict) else {"detail": answer}
    message = str(given.get("message") or given.get("detail") or given)
    if status == 404 and "model" in message:
        code = "model_not_found"
    elif status < 500 and _TOO_LONG.search(message):
        code = "context_length_exceeded"
    else:
        code = "invalid_value" if status < 500 else "engine_failed"
    return error_body(status, message, code, given.get("param"))
