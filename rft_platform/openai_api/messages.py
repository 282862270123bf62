"""Conversations and prompts in the forms that clients send them."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rft_platform.common import json_codec
from rft_platform.common.errors import UserError

#: Variables that a request cannot set: the conversation itself, and parameters and functions of the renderer.
RESERVED_VARIABLES = frozenset(
    {
        *("self", "messages", "tools", "documents", "conversation", "conversations", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("raise_exception", "strftime_now"),
    }
)
Message = dict[str, Any]


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise UserError if ``variables`` contains one of ``RESERVED_VARIABLES``, which the engine sets."""
    taken = sorted(RESERVED_VARIABLES & variables.keys())
    if taken:
        raise UserError(f"chat_template_kwargs: remove {', '.join(taken)}: only the engine sets these variables")


def normalised(message: Message) -> Message:
    """Convert a message to the form that templates expect: content is text, tool-call arguments are an object.

    Clients also send content as a list of text parts, as null or not at all, arguments as a JSON string, and the role
    developer.
    """
    result = {**with_known_role(message), "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise UserError("tool_calls of a message must be a list of objects with a function")
        result["tool_calls"] = [_normalised_call(call) for call in calls]
    return result


def with_known_role(message: Message) -> Message:
    """The message with a role that chat templates know: they call system what clients may call developer."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def text_of(content: Any) -> str:
    """The text of a message's content, which may be None, text or a list of text parts; UserError for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"message content must be text or a list of text parts, not {type(content).__name__}")
    kinds = {part.get("type") for part in content if isinstance(part, dict)}
    if not kinds <= {"text", "input_text", "output_text", "refusal"} or not all(isinstance(p, dict) for p in content):
        raise UserError(f"message content has parts {sorted(map(str, kinds))}: this engine reads text parts only")
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _normalised_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    if not isinstance(function, dict):
        raise UserError("the function of a tool call must be an object with name and arguments")
    function = dict(function)
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError):  # arguments that are no valid JSON (a model wrote them) stay text
            function["arguments"] = json_codec.parse(function["arguments"] or "{}")
    return {**call, "function": function}


def with_defaults(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A request without null fields, and with ``defaults`` for the fields that it does not set.

    ``max_completion_tokens`` is the newer name of ``max_tokens``: a request with one of them sets the limit.
    """
    given = {name: value for name, value in body.items() if value is not None}
    is_limited = "max_completion_tokens" in given
    return {name: value for name, value in defaults.items() if not (is_limited and name == "max_tokens")} | given


def prompts_of(prompt: Any) -> list[Any]:
    """The prompts of a text completion, each a text or a list of token ids."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]
