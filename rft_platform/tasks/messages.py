"""Parse cells of a dataset as chat messages (text, a list of messages, or such a list as JSON), with clear errors."""

import json
import math
from collections.abc import Sequence
from typing import Any

from rft_platform.common.errors import UserError

Message = dict[str, Any]

#: What ``json.loads`` raises: invalid text, a number with more digits than Python parses, nested too deep.
NOT_JSON = (ValueError, RecursionError)

ROLES = ("system", "developer", "user", "assistant", "tool")


def as_messages(value: Any, role: str, where: str, *, prompt_type: str | None = None) -> list[Message]:
    """A prompt or an answer as messages. Text becomes one message of ``role``; a number is converted to text.

    ``prompt_type`` has the values of the configuration: ``plaintext`` accepts only text, ``chatpair`` only lists (also
    as JSON), None both: JSON text of messages with roles is then a list. Raises UserError with a message that begins
    with ``where`` for anything else.
    """
    if prompt_type is None:
        value = without_json(value)
    if prompt_type != "chatpair":
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return [{"role": role, "content": str(value)}]
        if prompt_type is None and not isinstance(value, list):
            raise UserError(f"{where}: expected text or a list of messages, got {_shown(value)}")
    if prompt_type == "plaintext":
        raise UserError(f"{where}: expected text (prompt_type plaintext), got {type(value).__name__}")
    return conversation(value, where)


def without_json(value: Any) -> Any:
    """The messages of a JSON text that is a list of messages with roles; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except NOT_JSON:
        return value
    is_conversation = isinstance(found, list) and all(
        isinstance(message, dict) and message.get("role") in ROLES for message in found
    )
    return found if is_conversation and found else value


def conversation(value: Any, where: str) -> list[Message]:
    """A list of messages, given as a list or as JSON text; UserError beginning with ``where`` for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except NOT_JSON:
            raise UserError(f"{where}: expected a list of messages, got the text {value[:40]!r}") from None
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: expected a list of messages, got {_shown(value)}")
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(value)]


def learned(messages: Sequence[Message], where: str = "messages") -> list[int]:
    """Indices of the messages to train on: the assistant's, except those with ``weight`` 0."""
    return [
        i
        for i, message in enumerate(messages)
        if message["role"] == "assistant" and weight_of(message, f"{where}[{i}]") > 0
    ]


def weight_of(message: Message, where: str) -> float:
    """Factor of the loss on a message, 1 by default; UserError unless it is a finite number >= 0."""
    weight = message.get("weight")
    if weight is None:
        return 1.0
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise UserError(f"{where}: weight is {weight!r}; expected a number of at least 0; the loss is multiplied by it")
    return float(weight)


def as_context(messages: Sequence[Message]) -> list[Message]:
    """The messages, with ``weight`` 0 set on those of the assistant, so that these are context and not learned."""
    return [{**message, "weight": 0} if message["role"] == "assistant" else message for message in messages]


def with_system(messages: list[Message], prompt: str | None) -> list[Message]:
    """The conversation with ``prompt`` as its system message, unless it has one already."""
    if not prompt or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": prompt}, *messages]


def tools_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    """The JSON schemas of a conversation's tools, given as a list or as JSON text; None if there are none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except NOT_JSON as error:
            raise UserError(f"{where}: not readable JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"{where}: expected a list of JSON schemas, got {_shown(value)}")
    return value


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where}: expected a message with role and content, got {_shown(message)}")
    if message.get("role") not in ROLES:
        raise UserError(f"{where}: role {message.get('role')!r}; expected one of {', '.join(ROLES)}")
    kept = {name: value for name, value in message.items() if value is not None}  # Parquet fills columns with nulls
    content = kept.setdefault("content", "")
    if not isinstance(content, str | list):
        raise UserError(f"{where}: content is {_shown(content)}; expected text")
    if kept["role"] == "assistant" and not content and not kept.get("tool_calls"):
        raise UserError(f"{where}: an assistant message without content or tool_calls: there is nothing to learn")
    weight_of(kept, where)
    return kept


def _shown(value: Any) -> str:
    return "nothing" if value in (None, []) else f"{type(value).__name__} {str(value)[:40]!r}"
