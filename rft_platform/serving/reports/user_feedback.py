"""The feedback of users on given calls, with values and comments, for MLflow's traces."""

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import Engine, select

from rft_platform.model_registry.run_traces import GivenFeedback
from rft_platform.serving.database import Call, Feedback, FeedbackCall, readings

_IDS_A_QUERY = 500


def feedback_on(engine: Engine, msg_ids: Sequence[str]) -> dict[str, list[GivenFeedback]]:
    """The feedback on each of these answers, oldest first; answers without feedback are left out.

    A feedback without value and comment, for example an erased one, is left out, too. So are corrections.
    """
    found: dict[str, list[GivenFeedback]] = defaultdict(list)
    with readings(engine)() as session:
        for start in range(0, len(msg_ids), _IDS_A_QUERY):
            query = (
                select(Call.msg_id, Feedback)
                .join(FeedbackCall, FeedbackCall.number == Call.number)
                .join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
                .where(Call.msg_id.in_(msg_ids[start : start + _IDS_A_QUERY]))
                .order_by(Feedback.received_at, Feedback.feedback_id)
            )
            for msg_id, each in session.execute(query):
                if each.value is not None or each.comment:
                    found[msg_id].append(GivenFeedback(each.feedback_id, each.metric, each.value, each.comment))
    return dict(found)
