"""The rewards that feedback gives to calls, by the formula ``service.train_on``."""

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from rft_platform.config.schema.reward_formula import PLAIN, RewardFormula
from rft_platform.online.traffic.database import Call, Feedback, FeedbackCall, parts
from rft_platform.online.traffic.declared_metrics import IMPLICIT
from rft_platform.online.traffic.incoming import NewFeedback


def trains(feedback: NewFeedback, formula: RewardFormula) -> bool:
    """Whether the value of a feedback is part of the reward."""
    return feedback.value is not None and feedback.metric in formula.names


def rewards(session: Session, calls: Sequence[Call], feedback: NewFeedback, formula: RewardFormula) -> dict[int, float]:
    """The rewards of calls by their numbers, after ``feedback`` was stored; without calls that lack a metric.

    The newest value of a metric counts, and an implicit one only if no person has given a value.
    """
    assert feedback.value is not None, feedback
    if formula == PLAIN:
        return {call.number: feedback.value for call in calls}
    known = defaultdict[int, dict[str, float]](dict)
    by_a_person = Feedback.tags["source"].as_string().is_distinct_from(IMPLICIT)
    numbers = [call.number for call in calls]
    session.flush()
    for part in parts(numbers):
        query = (
            select(FeedbackCall.number, Feedback.metric, Feedback.value)
            .join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
            .where(FeedbackCall.number.in_(part), Feedback.metric.in_(formula.names))
            .order_by(by_a_person, Feedback.received_at)  # false, the implicit values, first: others replace them
        )
        for number, metric, value in session.execute(query):
            if value is not None:
                known[number][metric] = value
    given, is_implicit = {feedback.metric: feedback.value}, feedback.tags.get("source") == IMPLICIT
    values = {number: given | known[number] if is_implicit else known[number] | given for number in numbers}
    found = {number: formula.value(metrics) for number, metrics in values.items()}
    return {number: reward for number, reward in found.items() if reward is not None}
