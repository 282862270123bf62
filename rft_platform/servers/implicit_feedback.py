"""Implicit feedback: a model judges the user's next message of a conversation, which rewards the previous answer.

A thread of the service asks the model, so no request waits for it. Implicit feedback never replaces a reward that a
person gave. A person's reward that arrives later replaces the implicit reward until the row is committed.
"""

import asyncio
import logging
import threading
import time

from sqlalchemy import Engine

from rft_platform.common.errors import JudgeUnavailableError
from rft_platform.common.fault_classification import described
from rft_platform.config.schema.service import ImplicitFeedback
from rft_platform.judging.judge_context import JudgeContext, JudgeState
from rft_platform.judging.llm.judges import ReactionJudge
from rft_platform.rounds.project.project import Project
from rft_platform.serving.incoming import NewFeedback
from rft_platform.serving.reports.reactions import Reaction, unjudged_reactions
from rft_platform.serving.rules.declared_metrics import IMPLICIT, IMPLICIT_ID, REWARD
from rft_platform.serving.traffic import ReusedFeedbackIdError, TrafficStore

LOG = logging.getLogger(__name__)
_MOST = 32  # reactions that are judged together


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
        self.rewards += reward is not None
        self.unclear += reward is None
        return result.matched + result.late > 0
