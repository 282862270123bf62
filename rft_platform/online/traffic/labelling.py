"""The rewards that feedback gives to calls, by the formula ``service.train_on``."""

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from rft_platform.config.schema.reward_formula import PLAIN, RewardFormula
from rft_platform.online.traffic.database import Call, Feedback, FeedbackCall
from rft_platform.online.traffic.incoming import NewFeedback

_IDS_A_QUERY = 500


def trains(feedback: NewFeedback, formula: RewardFormula) -> bool:
    """Whether the value of a feedback is part of the reward."""
    return feedback.value is not None and feedback.metric in formula.names


def rewards(session: Session, calls: Sequence[Call], feedback: NewFeedback, formula: RewardFormula) -> dict[int, float]:
    """The rewards of calls by their numbers, after ``feedback`` was stored; without calls that lack a metric."""
    assert feedback.value is not None, feedback
    if formula == PLAIN:
        return {call.number: feedback.value for call in calls}
    known = defaultdict[int, dict[str, float]](dict)
    numbers = [call.number for call in calls]
    session.flush()
    for start in range(0, len(numbers), _IDS_A_QUERY):
        query = (
            select(FeedbackCall.number, Feedback.metric, Feedback.value)
            .join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
            .where(FeedbackCall.number.in_(numbers[start : start + _IDS_A_QUERY]), Feedback.metric.in_(formula.names))
            .order_by(Feedback.received_at)
        )
        for number, metric, value in session.execute(query):
            if value is not None:
                known[number][metric] = value
    found = {number: formula.value({**known[number], feedback.metric: feedback.value}) for number in numbers}
    return {number: reward for number, reward in found.items() if reward is not None}
