"""Implicit feedback: a model judges the user's next message of a conversation, which rewards the previous answer.

A thread of the service asks the model, so no request waits for it. Implicit feedback never replaces a reward that a
person gave. A person's reward that arrives later replaces the implicit reward until the row is committed.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, and_, func, or_, select
from sqlalchemy.orm import aliased

from rft_platform.common.errors import JudgeUnavailableError
from rft_platform.common.fault_classification import described
from rft_platform.config.schema.service import ImplicitFeedback
from rft_platform.judging.judge_context import JudgeContext, JudgeState
from rft_platform.judging.llm.judges import ReactionJudge
from rft_platform.online.traffic.database import RECORDED, Call, Feedback, FeedbackCall, readings
from rft_platform.online.traffic.declared_metrics import IMPLICIT, IMPLICIT_ID, REWARD
from rft_platform.online.traffic.incoming import NewFeedback
from rft_platform.online.traffic.store import ReusedFeedbackIdError, TrafficStore
from rft_platform.rounds.project.project import Project

_OUT_OF_ORDER = 1_000  # calls answered at about the same time may be stored in another order, within this many rows
LOG = logging.getLogger(__name__)
_MOST = 32  # reactions that are judged together


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
    """The newest ``most`` answers after ``since`` that have no reward, were not judged yet, and have a next call.

    With ``service.train_on`` an answer that has a reward, of a person or a verdict, may wait for other metrics.
    """
    oldest = select(Call.number).where(Call.recorded_at >= since).order_by(Call.recorded_at).limit(_OUT_OF_ORDER)
    later = aliased(Call)
    reward = and_(Feedback.metric == REWARD, Feedback.value.is_not(None))  # a comment alone is one without a value
    judged = (
        select(FeedbackCall.number)
        .join(Feedback, Feedback.feedback_id == FeedbackCall.feedback_id)
        .where(FeedbackCall.number == Call.number, or_(Feedback.metric == IMPLICIT, reward))
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
    question = next((_text(each.get("content")) for each in reversed(before) if each.get("role") == "user"), "")
    answer = _text(response.get("content"))
    return Reaction(
        call.msg_id, call.choice, call.tenant, question, answer, _text(after[1].get("content")) if continues else None
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


class ImplicitRewards:
    """Judges reactions at intervals and stores the rewards."""

    def __init__(self, project: Project, database: Engine, store: TrafficStore, settings: ImplicitFeedback) -> None:
        endpoint = {"base_url": settings.base_url, "model": settings.model, "api_key_env": settings.api_key_env}
        self._judge = ReactionJudge.model_validate({"model": endpoint, "concurrency": settings.concurrency})
        self._state = JudgeState.of(project.home, project.model_name)
        self._database = database
        self._store = store
        self._settings = settings
        self.rewards = self.unclear = self.failures = 0  # since the start

    def metrics(self) -> dict[str, float]:
        """Numbers for ``/metrics``."""
        return {
            "implicit_rewards": self.rewards,
            "implicit_unclear": self.unclear,
            "implicit_failures": self.failures,
        }

    def run(self, stop: threading.Event) -> None:
        """Judge until ``stop`` is set. A failed attempt is repeated at the next interval."""
        while not stop.wait(self._settings.interval_s):
            try:
                while self.judge_waiting() and not stop.is_set():
                    pass
            except Exception as error:
                self.failures += 1
                LOG.warning("implicit feedback failed, repeated later: %s", described(error))

    def judge_waiting(self) -> int:
        """Judge at most ``_MOST`` waiting reactions; returns the number of verdicts that are new in the database.

        A verdict is not stored, and does not count, if another feedback already has its id: the caller repeats the call
        while the number is above 0, and would otherwise judge the same answer for ever.
        """
        since = time.time() - self._settings.within_s
        found = unjudged_reactions(self._database, since, _MOST)
        return asyncio.run(self._judge_all(found)) if found else 0

    async def _judge_all(self, reactions: list[Reaction]) -> int:
        context = JudgeContext(self._state, {})
        try:
            async with asyncio.TaskGroup() as group:
                stored = [group.create_task(self._judge_one(context, each)) for each in reactions]
            return sum(each.result() for each in stored)
        except* JudgeUnavailableError as unavailable:
            raise unavailable.exceptions[0] from None
        finally:
            await context.aclose()

    async def _judge_one(self, context: JudgeContext, reaction: Reaction) -> bool:
        """Judge and store; returns whether the verdict is new in the database."""
        reward = None
        if reaction.reaction:
            try:
                reward = await self._judge.reward(context, reaction.question, reaction.answer, reaction.reaction)
            except RuntimeError:  # the model refused the request, or gave no valid answer
                LOG.warning("no valid answer about the reaction to %s", reaction.msg_id)
        verdict = NewFeedback(
            feedback_id=f"{IMPLICIT_ID}{reaction.msg_id}-{reaction.choice}",
            msg_ids=[reaction.msg_id],
            choice=reaction.choice,
            value=reward,
            metric=IMPLICIT if reward is None else REWARD,
            tags={"source": IMPLICIT},
            tenant=reaction.tenant,
            only_unlabelled=True,
        )
        try:
            result = self._store.give_feedback(verdict)
        except ReusedFeedbackIdError:  # another process has stored another verdict
            return False
        is_new = result.matched + result.late > 0
        self.rewards += is_new and reward is not None
        self.unclear += is_new and reward is None
        return is_new
