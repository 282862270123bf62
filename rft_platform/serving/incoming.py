"""Calls and feedback that have just arrived, and the database rows made from them. Texts are redacted here."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rft_platform.serving.database import RECORDED, UNTRAINABLE
from rft_platform.serving.rules.action_types import action_of
from rft_platform.serving.rules.declared_metrics import REWARD
from rft_platform.serving.rules.redaction import Redaction

ENGINE, TEMPLATE_HASH = "engine", "template_hash"  #: keys added to the recorded call in ``Call.model_call``

_TEXTS = ("comment", "correction", "tags", "user_feedback")  # parts of a feedback's body that hold text


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

    Raises UserCodeError if the function of the redaction fails.
    """
    changed = redaction.model_call(call.model_call)
    stored = call if changed is None else replace(call, model_call=changed, trainable=False)
    values = {name: getattr(stored, name) for name in NewCall.__dataclass_fields__ if name != "trainable"}
    state = RECORDED if stored.trainable else UNTRAINABLE
    return {**values, "state": state, "action": action_of(call.model_call)}


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
