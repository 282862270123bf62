"""Answers without a reward to which the user has reacted with a next message in the same conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import aliased

from rft_platform.serving.database import RECORDED, Call, Feedback, FeedbackCall, readings
from rft_platform.serving.rules.declared_metrics import IMPLICIT

_OUT_OF_ORDER = 1_000  # calls answered at about the same time may be stored in another order, within this many rows


@dataclass(frozen=True, slots=True)
class Reaction:
    """An answer and the user's next message; ``reaction`` is None if the next call is not a reaction to the answer."""

    msg_id: str
    choice: int
    tenant: str
    question: str
    answer: str
    reaction: str | None


def unjudged_reactions(engine: Engine, since: float, most: int) -> list[Reaction]:
    """The newest ``most`` answers after ``since`` that have no reward, were not judged yet, and have a next call."""
    oldest = select(Call.number).where(Call.recorded_at >= since).order_by(Call.recorded_at).limit(_OUT_OF_ORDER)
    later = aliased(Call)
    judged = (
        select(FeedbackCall.number)
        .join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
        .where(FeedbackCall.number == Call.number, Feedback.metric == IMPLICIT)
    )
    next_call = (
        select(func.min(later.number))
        .where(later.conversation == Call.conversation, later.tenant == Call.tenant, later.number > Call.number)
        .where(later.msg_id != Call.msg_id, later.recorded_at >= since)
        .correlate(Call)
        .scalar_subquery()
    )
    query = (
        select(Call, next_call)
        .where(Call.state == RECORDED, Call.conversation.is_not(None), Call.recorded_at >= since)
        .where(next_call.is_not(None), ~judged.exists())
        .order_by(Call.number.desc())
        .limit(most)
    )
    with readings(engine)() as session:
        first = session.scalar(select(func.min(oldest.subquery().c.number)))
        if first is None:
            return []
        found = session.execute(query.where(Call.number >= first)).all()  # bounded: older calls are not read
        return [_reaction(call, session.get_one(Call, number)) for call, number in found]


def _reaction(call: Call, later: Call) -> Reaction:
    before: Sequence[Mapping[str, Any]] = call.model_call.get("messages") or []
    after: Sequence[Mapping[str, Any]] = (later.model_call.get("messages") or [])[len(before) :]
    response = call.model_call.get("response") or {}
    continues = [each.get("role") for each in after[:2]] == ["assistant", "user"] and _same(after[0], response)
    asked = next((_text(each.get("content")) for each in reversed(before) if each.get("role") == "user"), "")
    answer = _text(response.get("content"))
    return Reaction(
        call.msg_id, call.choice, call.tenant, asked, answer, _text(after[1].get("content")) if continues else None
    )


def _same(sent: Mapping[str, Any], response: Mapping[str, Any]) -> bool:
    """Whether the conversation continues with this answer, and not with another choice or an edited answer."""
    answer = _text(response.get("content")).strip()
    return bool(answer) and _text(sent.get("content")).strip() == answer


def _text(content: Any) -> str:
    """The text of a message's content; other parts, such as images, are left out."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and part.get("text"))
    return content if isinstance(content, str) else ""
