"""The judge ``ranking``: a model sees all runs of a group at once and scores them relative to each other.

One call for each group, instead of the n (n - 1) calls of ``pairwise``. Scores of different groups are not comparable,
which advantages within a group (``grpo``, ``rloo``) do not need. Method: RULER of OpenPipe's ART.
"""

import hashlib
from typing import Any

from pydantic import model_validator

from rft_platform.algorithms.common.registry import Share
from rft_platform.judging.judge_context import JudgeContext
from rft_platform.judging.judged_run import JudgedRun
from rft_platform.judging.llm.asking import ask, read_scores
from rft_platform.judging.llm.judges import GradingSettings, answer_of, prompt_of, question_of, reference_of
from rft_platform.judging.types import JudgeOutput

RANKING = """Score {count} answers to the same task relative to each other by these criteria.

Criteria:
{criteria}

Each score is a number from 0 (worst) to 1 (best). A better answer has a higher score. If two answers differ little, so
do their scores; if one is much better, its score is much higher. An answer that reaches the goal of the task scores
higher than every answer that does not.

<task>
{question}
</task>
{reference}{answers}
The order in which the answers stand means nothing. Answer with one JSON object and nothing else, reasons first:
{form}"""


class RankingJudge(GradingSettings):
    """The judge ``ranking``: one call for the different answers of a group."""

    template: str = RANKING
    """The prompt; ``{count}``, ``{criteria}``, ``{question}``, ``{reference}``, ``{answers}`` (each between tags with
    its number) and ``{form}`` are replaced."""

    @model_validator(mode="after")
    def _sound(self) -> "RankingJudge":
        if "{answers}" not in self.template:
            raise ValueError("template has no {answers}: the model would not see what it ranks")
        return self

    async def __call__(
        self, task: dict[str, Any], responses: list[Any], runs: list[JudgedRun], context: JudgeContext
    ) -> list[JudgeOutput]:
        """Return each run's score, 0 to 1; 0.5 for all if all answers are equal. Metric: ``compared``.

        The metric counts the different answers. Equal answers are shown once and have the same score. Their order does
        not depend on the order of the runs.
        """
        texts = [
            answer_of(response, run, self.transcript).strip() for response, run in zip(responses, runs, strict=True)
        ]
        different = sorted(set(texts), key=lambda text: hashlib.sha256(text.encode("utf-8", "replace")).digest())
        if len(different) < 2:
            return [JudgeOutput(0.5, {"compared": float(len(different))}) for _ in texts]
        scores = await self._ask(task, different, context)
        return [JudgeOutput(scores[different.index(text)], {"compared": float(len(different))}) for text in texts]

    async def _ask(self, task: dict[str, Any], answers: list[str], context: JudgeContext) -> list[float]:
        names = [f"answer_{number}" for number in range(1, len(answers) + 1)]
        shown = "".join(f"<{name}>\n{{{name}}}\n</{name}>\n" for name in names)
        prompt = prompt_of(
            self.template.replace("{answers}", shown),
            {"criteria": self.described(), "count": str(len(answers)), "form": form_of(names)},
            {"question": question_of(task, self.question_key), **dict(zip(names, answers, strict=True))},
            reference_of(task, self.reference_key),
            context.endpoint(self.model).control_tokens,
        )
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": prompt}]
        scores = await ask(context, self, messages, lambda text: read_scores(text, names, Share))
        return [scores[name] for name in names]


def form_of(names: list[str]) -> str:
    """The JSON object that the model should answer."""
    scores = ", ".join(f'"{name}": <number>' for name in names)
    return f'{{"reasons": "<one sentence an answer>", "scores": {{{scores}}}}}'
