"""Calls and feedback that have just arrived, and the database rows made from them. Texts are redacted here."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rft_platform.common import json_codec
from rft_platform.common.personal_data import TEXTS, Redaction
from rft_platform.online.traffic.database import RECORDED, UNTRAINABLE
from rft_platform.online.traffic.declared_metrics import REWARD

TOOL_VALID, TOOL_INVALID = "tool_valid", "tool_invalid"
QUESTION, ANSWER = "question", "answer"
ACTIONS = (TOOL_VALID, TOOL_INVALID, QUESTION, ANSWER)

_MARKS = ("<tool_call>", "<|tool_call", "[TOOL_CALLS]", "<function=")  # text left by a tool call that was not parsed
_QUESTION_MARKS = ("?", "？", "؟")
_CLOSING = " \t\r\n*_\"'`)]}»”’"
ENGINE, TEMPLATE_HASH = "engine", "template_hash"  #: keys added to the recorded call in ``Call.model_call``
_WITHOUT_NUL = Redaction(lambda text: text.replace("\0", "\ufffd"))
_TEXTS = ("comment", "correction", "tags", "user_feedback")  # parts of a feedback's body that hold text


def action_of(call: Mapping[str, Any]) -> str:
    """The action of a recorded call (``messages``, ``tools``, ``response``).

    A tool call is valid if it names a tool of the request and its arguments are a JSON object with all required
    parameters. An answer that ends with a question mark is a question.
    """
    response = call.get("response") or {}
    calls, text = response.get("tool_calls") or [], response.get("content")
    if calls:
        tools = {name: parameters for name, parameters in map(_tool, call.get("tools") or []) if isinstance(name, str)}
        return TOOL_VALID if all(_is_valid(each, tools) for each in calls) else TOOL_INVALID
    if not isinstance(text, str):
        return ANSWER
    if call.get("tools") and any(mark in text for mark in _MARKS):
        return TOOL_INVALID
    return QUESTION if text.rstrip(_CLOSING).endswith(_QUESTION_MARKS) else ANSWER


def _tool(tool: Any) -> tuple[Any, Any]:
    """Name and parameters of a tool in the format of OpenAI's chat completions API or responses API."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return (function.get("name"), function.get("parameters")) if isinstance(function, Mapping) else (None, None)


def _is_valid(call: Any, tools: Mapping[Any, Any]) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or name not in tools:
        return False
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        return False
    if not isinstance(arguments, dict):
        return False
    parameters = tools[name]
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    return all(isinstance(each, str) and each in arguments for each in required) if isinstance(required, list) else True


@dataclass(frozen=True, slots=True)
class NewCall:
    """A call that has just been answered."""

    msg_id: str
    choice: int
    model_call: dict[str, Any]  # JSON of the recorded call
    policy_version: int | None
    tokens: int  # prompt and response
    recorded_at: float
    tenant: str = ""
    subject: str | None = None
    conversation: str | None = None
    task_id: str | None = None
    run_id: str | None = None
    variant: str | None = None
    trainable: bool = True  # False: temperature 0, top_p or top_k, without which there is no importance ratio


@dataclass(frozen=True, slots=True)
class NewFeedback:
    """A report about the calls ``msg_ids``; without ``msg_ids`` about a run (``task_id``, ``run_id``) or conversation.

    With a run and a conversation it is about the calls of the run in the conversation.
    ``value`` is the metric's value; None for a comment or a correction alone.
    """

    feedback_id: str
    msg_ids: Sequence[str]
    value: float | None
    metric: str = REWARD
    task_id: str | None = None
    run_id: str | None = None
    conversation: str | None = None
    comment: str | None = None
    correction: str | None = None
    choice: int | None = None  # of the messages' choices; None: all
    only_unlabelled: bool = False  # do not change calls that already have a reward
    tags: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = ""


def row_of_call(call: NewCall, redaction: Redaction) -> dict[str, Any]:
    """The values of a row of ``calls``. If redaction changes a text, the row has no tokens and cannot be trained on.

    The same holds for a text with NUL, which a policy may sample: PostgreSQL cannot read JSON that contains it.
    Raises UserCodeError if the function of the redaction fails.
    """
    changed = redaction.model_call(call.model_call)
    changed = _without_nul(call.model_call if changed is None else changed) or changed
    stored = call if changed is None else replace(call, model_call=changed, trainable=False)
    values = {name: getattr(stored, name) for name in NewCall.__dataclass_fields__ if name != "trainable"}
    state = RECORDED if stored.trainable else UNTRAINABLE
    return {**values, "state": state, "action": action_of(call.model_call)}


def _without_nul(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """A recorded call without NUL in its texts and without its tokens; None if no text has one."""
    texts = [call.get(name) for name in TEXTS]
    return _WITHOUT_NUL.model_call(call) if json_codec.has_nul(json_codec.dump(texts)) else None


def redacted_feedback(feedback: NewFeedback, redaction: Redaction) -> NewFeedback:
    """The feedback as it may be stored. Raises UserCodeError if the function of the redaction fails."""
    texts = {name: redaction.value(feedback.request[name]) for name in _TEXTS if name in feedback.request}
    return replace(
        feedback,
        comment=redaction.text(feedback.comment),
        correction=redaction.text(feedback.correction),
        tags=redaction.value(feedback.tags),
        request={**feedback.request, **texts},
    )


def row_of_feedback(feedback: NewFeedback, now: float) -> dict[str, Any]:
    """The values of a row of ``feedback``."""
    kept = ("feedback_id", "tenant", "metric", "value", "comment", "correction")
    row = {name: getattr(feedback, name) for name in kept}
    if feedback.tenant:  # each tenant has its own ids
        name = f"{feedback.tenant}/{feedback.feedback_id}"
        row["feedback_id"] = hashlib.sha256(name.encode()).hexdigest()
    return row | {"received_at": now, "tags": dict(feedback.tags), "request": dict(feedback.request)}
