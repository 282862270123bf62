"""The judge ``llm``: a model scores every criterion; the reward is the weighted mean of the scores, between 0 and 1."""

import json
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator

from rft_platform.config.schema.buffer import PATIENCE
from rft_platform.judging.judge_context import JudgeContext
from rft_platform.judging.judged_run import JudgedRun
from rft_platform.judging.llm.asking import AskingSettings, InvalidAnswerError, ask, last_object
from rft_platform.judging.llm.prompts import RUBRIC, SCORING, SYSTEM, answer_of, prompt_of, question_of, reference_of
from rft_platform.judging.types import JudgeOutput


class Criterion(BaseModel):
    """A criterion to grade by, and its weight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    description: str
    weight: float = Field(default=1.0, gt=0)


class GradingSettings(AskingSettings):
    """Settings that all grading judges share, in addition to how to ask the model."""

    criteria: dict[str, Criterion] = Field(min_length=1)
    """Name -> description, or name -> {description, weight}."""
    question_key: str = "question"
    """Column with the question; default: ``format.prompt_key``."""
    reference_key: str | None = None
    """Column with a reference answer to show to the model; null: none."""
    transcript: bool = False
    """Show the whole conversation, with tool calls and results, instead of the response."""
    system: str = SYSTEM

    @field_validator("criteria", mode="before")
    @classmethod
    def _described(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: {"description": entry} if isinstance(entry, str) else entry for name, entry in value.items()}

    def identity(self) -> dict[str, Any]:
        """Settings that the rewards depend on: all except those of ``PATIENCE`` (retries, limits, cache)."""
        return self.model_dump(mode="json", exclude=set(PATIENCE))

    def described(self) -> str:
        """The criteria as lines of a prompt."""
        return "\n".join(f"- {name}: {criterion.description}" for name, criterion in self.criteria.items())


class LlmJudge(GradingSettings):
    """The judge ``llm``: one call per run, with one score per criterion."""

    rubric: str = RUBRIC
    """Meaning of the scores."""
    template: str = SCORING
    """The prompt; ``{criteria}``, ``{rubric}``, ``{question}``, ``{reference}``, ``{answer}``, ``{low}``, ``{high}``
    and ``{form}`` are replaced."""
    scale: tuple[int, int] = (1, 5)
    """Lowest and highest score."""
    normalise: Literal["range", "top"] = "range"
    """``range``: (score - low) / (high - low). ``top``: score / high."""

    @model_validator(mode="after")
    def _sound(self) -> "LlmJudge":
        if self.scale[0] >= self.scale[1] or self.scale[1] <= 0:
            raise ValueError(f"scale is {list(self.scale)}: expected the lowest score, then a higher one above 0")
        if "{answer}" not in self.template:
            raise ValueError("template has no {answer}: the model would not see what it grades")
        return self

    async def __call__(self, task: dict[str, Any], response: Any, run: JudgedRun, context: JudgeContext) -> JudgeOutput:
        """Return the weighted mean of the criteria's scores, each scaled to 0..1; metrics: the unscaled scores."""
        low, high = map(str, self.scale)
        prompt = prompt_of(
            self.template,
            {"criteria": self.described(), "rubric": self.rubric, "low": low, "high": high, "form": self.form},
            {
                "question": question_of(task, self.question_key),
                "answer": answer_of(response, run, self.transcript),
            },
            reference_of(task, self.reference_key),
            context.endpoint(self.model).control_tokens,
        )
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": prompt}]
        scores = await ask(context, self, messages, self.read)
        weight = sum(criterion.weight for criterion in self.criteria.values())
        total = sum(criterion.weight * self._share(scores[name]) for name, criterion in self.criteria.items())
        return JudgeOutput(total / weight, {name: float(score) for name, score in scores.items()})

    def read(self, text: str) -> dict[str, int]:
        """Parse the scores of an answer.

        Raises InvalidAnswerError if a criterion has no score, is unknown, or has a score outside the scale.
        """
        document = last_object(text)
        form = _form_of(tuple(self.criteria), self.scale)
        try:
            scores: dict[str, int] = form.model_validate(document.get("scores")).model_dump()
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("scores", *first["loc"])))
            raise InvalidAnswerError(f"{place}: {first['msg']}, got {first['input']!r:.80}") from error
        return scores

    def _share(self, score: int) -> float:
        low, high = self.scale
        return (score - low) / (high - low) if self.normalise == "range" else score / high

    @property
    def form(self) -> str:
        """The JSON object that the model is asked for."""
        scores = json.dumps(dict.fromkeys(self.criteria, "N"), ensure_ascii=False).replace('"N"', "<number>")
        return f'{{"reasons": "<one sentence a criterion>", "scores": {scores}}}'


@lru_cache(maxsize=64)
def _form_of(names: tuple[str, ...], scale: tuple[int, int]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (int, Field(ge=scale[0], le=scale[1])) for name in names}
    return create_model("Scores", __config__=ConfigDict(extra="forbid"), **fields)
