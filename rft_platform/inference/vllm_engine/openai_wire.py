"""Convert requests and responses of vLLM's own OpenAI routes, so that callers see no difference between engines.

Requests are checked by the common schema and their messages are normalised. Responses get the policy version, and
errors get OpenAI's codes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rft_platform.common import json_codec
from rft_platform.openai_api.errors import TOO_LONG, ApiError, error_body, invalid_fields, says_too_long
from rft_platform.openai_api.messages import prompts_of, text_of, with_known_role
from rft_platform.openai_api.schema import CHAT, COMPLETIONS, ChatBody, CompletionBody, SamplingBody
from rft_platform.openai_api.tokenizer import check_text

SCHEMAS: dict[str, type[SamplingBody]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}
EVENT = b"data: {"
UNASKED = ("prompt_token_ids", "token_ids")  # vLLM sends null for these fields if they were not requested
LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request in the form that vLLM receives."""

    body: bytes
    chat: ChatBody | None = None
    constrained: bool = False  # True: vLLM samples under a grammar, so the log-probs are not those of the policy


def checked_request(
    path: str, body: bytes, max_model_len: int, template_options: dict[str, Any] | None = None
) -> CheckedRequest:
    """The request to pass to vLLM; ApiError if a field is wrong or unsupported.

    Token limits are lowered to ``max_model_len`` - 1, as in every engine, because vLLM refuses larger limits.
    ``template_options`` are default variables of the chat template; the variables of the request override them.
    """
    try:
        fields = json_codec.parse_object(body)
    except ValueError as error:
        raise ApiError(400, f"the body must be a JSON object: {error}", "invalid_value") from error
    try:
        checked = SCHEMAS[path].model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error.errors()) from error
    for text in _texts(checked):
        check_text(text, max_model_len)
    passed_on = {name: value for name, value in fields.items() if value is not None}
    passed_on |= {name: min(int(passed_on[name]), max_model_len - 1) for name in LIMITS if name in passed_on}
    if path == COMPLETIONS:
        passed_on["add_special_tokens"] = False  # vLLM's default is true for plain completions
    if path == CHAT:
        passed_on["messages"] = [_message(message) for message in fields["messages"]]
        if passed_on.get("tools"):
            passed_on |= _unconstrained(passed_on)
        if template_options:
            passed_on["chat_template_kwargs"] = {**template_options, **passed_on.get("chat_template_kwargs", {})}
    constrained = isinstance(checked, ChatBody) and (checked.forced_tool is not None or checked.asks_for_json)
    return CheckedRequest(
        json.dumps(passed_on).encode(), checked if isinstance(checked, ChatBody) else None, constrained
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message to vLLM's schema: a known role, text content, and tool calls with their type."""
    normal = {**with_known_role(message), "content": text_of(message.get("content"))}
    if message.get("tool_calls"):
        normal["tool_calls"] = [{"type": "function", **call} for call in message["tool_calls"]]
    return normal


def _texts(body: SamplingBody) -> Iterator[str]:
    """The texts that vLLM will tokenise, without the text that the chat template adds."""
    if isinstance(body, ChatBody):
        yield "".join(text_of(message.get("content")) for message in body.conversation)
    elif isinstance(body, CompletionBody):
        yield from (prompt for prompt in prompts_of(body.prompt) if isinstance(prompt, str))


def _unconstrained(body: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields that make vLLM sample under a grammar although the tool call is optional.

    They are ``strict`` of a tool, and ``parallel_tool_calls`` if it is false. No other engine uses a grammar for them.
    """
    tools = [
        {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
        if isinstance(tool.get("function"), dict)
        else tool
        for tool in body["tools"]
    ]
    return {"tools": tools, "parallel_tool_calls": True}


def stamped_answer(body: bytes, version: int, constrained: bool = False) -> bytes:
    """Add the policy version to a JSON response, and ``constrained`` if it was sampled under a grammar."""
    answer = json.loads(body)
    if not isinstance(answer, dict):
        return body
    for part in [answer, *(answer.get("choices") or [])]:
        for name in UNASKED:
            if name in part and part[name] is None:
                del part[name]
        _name_reasoning(part.get("message"))
    return json.dumps({**answer, **_stamp(version, constrained)}).encode()


def stamped_events(data: bytes, version: int, constrained: bool = False) -> bytes:
    """Stamp each event of a piece of an event stream as ``stamped_answer`` does. vLLM sends whole events."""
    if EVENT not in data:
        return data
    stamp = b"data: " + json.dumps(_stamp(version, constrained)).encode()[:-1] + b", "
    lines = data.split(b"\n")
    return b"\n".join(stamp + _event(line)[len(EVENT) :] if line.startswith(EVENT) else line for line in lines)


def _stamp(version: int, constrained: bool) -> dict[str, Any]:
    return {"policy_version": version, **({"constrained": True} if constrained else {})}


def _event(line: bytes) -> bytes:
    """Rewrite a ``data:`` line of a stream: vLLM's ``reasoning`` also gets its usual name, ``reasoning_content``."""
    if b'"reasoning"' not in line:
        return line
    chunk = json.loads(line[len(EVENT) - 1 :])
    for choice in chunk.get("choices") or []:
        _name_reasoning(choice.get("delta"))
    return b"data: " + json.dumps(chunk).encode()


def _name_reasoning(message: Any) -> None:
    """Copy ``reasoning``, the name in newer versions of vLLM, to ``reasoning_content``, which agent frameworks read."""
    if isinstance(message, dict) and message.get("reasoning") is not None:
        message.setdefault("reasoning_content", message["reasoning"])


def openai_error(status: int, body: bytes) -> dict[str, Any]:
    """vLLM's error response with OpenAI's type and code."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = {"detail": body.decode(errors="replace")[:500]}
    fields = answer.get("error", answer) if isinstance(answer, dict) else {"detail": answer}
    message = str(fields.get("message") or fields.get("detail") or fields)
    if status == 404 and "model" in message:
        code = "model_not_found"
    elif status < 500 and says_too_long(message):
        code = TOO_LONG
    else:
        code = "invalid_value" if status < 500 else "engine_failed"
    return error_body(status, message, code, fields.get("param"))
