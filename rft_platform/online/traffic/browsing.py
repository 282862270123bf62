"""Find recorded calls by metric, tag, policy version, state, API key and time, and make a dataset of them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Engine, String, case, cast, func, select
from sqlalchemy.orm import Session, defer

from rft_platform.online.traffic.database import Call, Feedback, FeedbackCall, parts, readings
from rft_platform.online.traffic.declared_metrics import REWARD
from rft_platform.tasks.messages import as_context

MOST_IN_DATASET = 10_000  # calls of a dataset, so that it is made in seconds
_COLUMNS = (
    "msg_id", "choice", "recorded_at", "policy_version", "state", "tenant", "tokens", "reward", "model_call",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallSearch:
    """Which calls to find; empty: all."""

    metric: str = REWARD  # of the feedback that ``least``, ``most`` and ``tag`` are about
    least: float | None = None
    most: float | None = None
    tag: str = ""  # NAME or NAME=VALUE, of any feedback
    version: int | None = None
    state: str = ""
    key: str | None = None  # tenant of an API key; None: of all
    since: float | None = None  # seconds since the epoch
    until: float | None = None


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """What the calls of an API key used."""

    key: str
    calls: int
    tokens: int


def find_calls(engine: Engine, search: CallSearch, limit: int, offset: int = 0) -> list[dict[str, Any]]:
    """The matching calls, newest first, with the newest value of each metric and the tags of their feedback."""
    query = select(Call).where(*_conditions(engine, search)).order_by(Call.recorded_at.desc(), Call.number.desc())
    with readings(engine)() as session:
        return _with_feedback(session, session.scalars(query.limit(limit).offset(offset)).all())


def usage_by_key(engine: Engine, search: CallSearch) -> list[KeyUsage]:
    """Calls and tokens of each API key among the matching calls, the largest first."""
    tokens = func.sum(Call.tokens)
    query = select(Call.tenant, func.count(), tokens).where(*_conditions(engine, search)).group_by(Call.tenant)
    with readings(engine)() as session:
        return [KeyUsage(*row) for row in session.execute(query.order_by(tokens.desc(), Call.tenant))]


def known_metrics(engine: Engine) -> list[str]:
    """The metrics that any feedback has, and the reward."""
    with readings(engine)() as session:
        return sorted({REWARD, *session.scalars(select(Feedback.metric).distinct())})


def dataset_rows(engine: Engine, search: CallSearch) -> Iterator[dict[str, Any]]:
    """The newest matching calls as conversations for supervised fine-tuning, without calls whose text was erased."""
    for call in find_calls(engine, search, MOST_IN_DATASET):
        recorded = call["model_call"]
        if recorded.get("messages") and recorded.get("response"):
            answer = {name: value for name, value in recorded["response"].items() if value is not None}
            yield {
                "messages": [*as_context(recorded["messages"]), answer],
                "tools": recorded.get("tools") or None,
                **{name: call[name] for name in ("msg_id", "choice", "policy_version", "recorded_at", "metrics")},
            }


def _conditions(engine: Engine, search: CallSearch) -> Iterator[ColumnElement[bool]]:
    if search.least is not None or search.most is not None:
        value = Call.reward if search.metric == REWARD else Feedback.value
        bounds = [value >= search.least] if search.least is not None else []
        bounds += [value <= search.most] if search.most is not None else []
        yield from bounds if search.metric == REWARD else [_rated(Feedback.metric == search.metric, *bounds)]
    elif search.metric != REWARD:
        yield _rated(Feedback.metric == search.metric, Feedback.value.is_not(None))
    if search.tag:
        yield _rated(_tagged(engine, *search.tag.split("=", 1)))
    if search.version is not None:
        yield Call.policy_version == search.version
    if search.state:
        yield Call.state == search.state
    if search.key is not None:
        yield Call.tenant == search.key
    if search.since is not None:
        yield Call.recorded_at >= search.since
    if search.until is not None:
        yield Call.recorded_at <= search.until


def _tagged(engine: Engine, name: str, wanted: str = "") -> ColumnElement[bool]:
    """Whether a feedback has the tag ``name``, with the value ``wanted`` as pages show it if that is given.

    The tags are listed, because a path to one cannot hold every name in SQLite, which also takes true for 1.
    """
    text: ColumnElement[str]
    if engine.dialect.name == "sqlite":
        tags = func.json_each(Feedback.tags).table_valued("key", "value", "type")
        text = case((tags.c.type.in_(("true", "false")), tags.c.type), else_=cast(tags.c.value, String))
    else:
        tags = func.json_each_text(Feedback.tags).table_valued("key", "value")
        text = tags.c.value
    found = select(tags.c.key).where(tags.c.key == name, text == wanted if wanted else text.is_not(None))
    return found.correlate(Feedback).exists()


def _rated(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether a call has a feedback that meets the conditions."""
    feedback = select(FeedbackCall.number).join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
    return Call.number.in_(feedback.where(*conditions))


def _with_feedback(session: Session, calls: Sequence[Call]) -> list[dict[str, Any]]:
    metrics, tags = defaultdict[int, dict[str, float]](dict), defaultdict[int, dict[str, Any]](dict)
    numbers = [call.number for call in calls]
    for part in parts(numbers):
        query = (
            select(FeedbackCall.number, Feedback)
            .join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
            .where(FeedbackCall.number.in_(part))
            .options(defer(Feedback.request))
            .order_by(Feedback.received_at, Feedback.feedback_id)
        )
        for number, feedback in session.execute(query):
            if feedback.value is not None:
                metrics[number][feedback.metric] = feedback.value
            tags[number] |= feedback.tags
    return [
        {
            **{name: getattr(call, name) for name in _COLUMNS},
            "metrics": metrics[call.number],
            "tags": tags[call.number],
        }
        for call in calls
    ]
