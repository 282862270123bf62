"""The judge ``pairwise``: a model compares the runs of a group two by two; a run's reward is its win rate."""

import asyncio
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeInt, ValidationError, model_validator

from rft_platform.judging.judge_context import JudgeContext
from rft_platform.judging.judged_run import JudgedRun
from rft_platform.judging.llm.asking import InvalidAnswerError, ask, last_object
from rft_platform.judging.llm.prompts import COMPARING, answer_of, prompt_of, question_of, reference_of
from rft_platform.judging.llm.scoring import GradingSettings
from rft_platform.judging.types import JudgeOutput

_POINTS = {"A": 1.0, "tie": 0.5, "B": 0.0}


class _Verdict(BaseModel):
    """The model's answer to one comparison."""

    better: Literal["A", "B", "tie"]


class PairwiseJudge(GradingSettings):
    """The judge ``pairwise``: asks every pair in both orders, so that a preference for one position cancels out."""

    template: str = COMPARING
    """The prompt; ``{criteria}``, ``{question}``, ``{reference}``, ``{answer_a}`` and ``{answer_b}`` are replaced."""
    pivot: NonNegativeInt | None = None
    """Index (from 0) of the run that each other run is compared with: 2 (n - 1) calls for n runs. null: all pairs are
    compared, n (n - 1) calls."""

    @model_validator(mode="after")
    def _sound(self) -> "PairwiseJudge":
        if "{answer_a}" not in self.template or "{answer_b}" not in self.template:
            raise ValueError("template needs both {answer_a} and {answer_b}")
        return self

    @property
    def form(self) -> str:
        """The form of the JSON object that the model must return."""
        return '{"reason": "<one sentence>", "better": "A" or "B" or "tie"}'

    async def __call__(
        self, task: dict[str, Any], responses: list[Any], runs: list[JudgedRun], context: JudgeContext
    ) -> list[JudgeOutput]:
        """Return each run's mean points against its opponents (win 1, tie 0.5, loss 0); 0.5 for a group of one run.

        Metrics: ``compared``, the number of opponents, and ``consistent``, the share of opponents for which the model
        decides equally in both orders.
        """
        answers = [answer_of(response, run, self.transcript) for response, run in zip(responses, runs, strict=True)]
        pairs = _pairs(len(answers), self.pivot)
        found = await asyncio.gather(*(self._compare(task, answers[a], answers[b], context) for a, b in pairs))
        points: list[list[float]] = [[] for _ in answers]
        agreed: list[list[bool]] = [[] for _ in answers]
        for (first, second), (point, consistent) in zip(pairs, found, strict=True):
            points[first].append(point)
            points[second].append(1.0 - point)
            agreed[first].append(consistent)
            agreed[second].append(consistent)
        return [
            JudgeOutput(
                sum(own) / len(own) if own else 0.5,
                {"compared": float(len(own)), "consistent": sum(both) / len(both) if both else 1.0},
            )
            for own, both in zip(points, agreed, strict=True)
        ]

    async def _compare(
        self, task: dict[str, Any], first: str, second: str, context: JudgeContext
    ) -> tuple[float, bool]:
        """Points of the first answer, and whether the model decides equally in both orders.

        Equal answers tie without a call.
        """
        if first.strip() == second.strip():
            return 0.5, True
        forward, backward = await asyncio.gather(
            self._ask(task, first, second, context), self._ask(task, second, first, context)
        )
        return (forward + 1.0 - backward) / 2, forward == 1.0 - backward

    async def _ask(self, task: dict[str, Any], answer_a: str, answer_b: str, context: JudgeContext) -> float:
        prompt = prompt_of(
            self.template,
            {"criteria": self.described()},
            {"question": question_of(task, self.question_key), "answer_a": answer_a, "answer_b": answer_b},
            reference_of(task, self.reference_key),
            context.endpoint(self.model).control_tokens,
        )
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": prompt}]
        return await ask(context, self, messages, read)


def read(text: str) -> float:
    """Parse the points of answer A. Raises InvalidAnswerError if the model's choice is neither A, B nor tie."""
    try:
        return _POINTS[_Verdict.model_validate(last_object(text)).better]
    except ValidationError as error:
        raise InvalidAnswerError('it needs "better": "A", "B" or "tie"') from error


def _pairs(count: int, pivot: int | None) -> Sequence[tuple[int, int]]:
    if pivot is None or count < 2:
        return list(combinations(range(count), 2))
    middle = min(pivot, count - 1)
    return [(middle, other) for other in range(count) if other != middle]
