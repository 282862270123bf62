"""Judge an answer by the user's next message: a model says whether the message shows that the user is satisfied."""

from typing import Literal

from pydantic import BaseModel, ValidationError

from rft_platform.judging.judge_context import JudgeContext
from rft_platform.judging.llm.asking import AskingSettings, InvalidAnswerError, ask, last_object
from rft_platform.judging.llm.prompts import SYSTEM, prompt_of

TEMPLATE = """A user asked something, got an answer, and then sent a next message. Does the next message show that the
answer satisfied the user?

- yes: it thanks, confirms, builds on the answer, or goes on to something else after it
- no: it complains, corrects, repeats the question, or says that something failed
- unclear: neither

<question>
{question}
</question>
<answer>
{answer}
</answer>
<next_message>
{reaction}
</next_message>

Answer with one JSON object and nothing else, the reason first:
{form}"""

_REWARDS = {"yes": 1.0, "no": 0.0, "unclear": None}


class _Verdict(BaseModel):
    """The model's answer about one message of a user."""

    satisfied: Literal["yes", "no", "unclear"]


class ReactionJudge(AskingSettings):
    """Judges users' next messages. The model's answers are not stored, because they may quote the user."""

    cache: bool = False
    on_invalid: Literal["fail", "drop"] = "drop"

    @property
    def form(self) -> str:
        """The JSON object that the model is asked for."""
        return '{"reason": "<one sentence>", "satisfied": "yes" or "no" or "unclear"}'

    async def reward(self, context: JudgeContext, question: str, answer: str, reaction: str) -> float | None:
        """1 if the user is satisfied, 0 if not, None if the message does not show it. Raises what ``ask`` raises."""
        material = {"question": question, "answer": answer, "reaction": reaction}
        tokens = context.endpoint(self.model).control_tokens
        prompt = prompt_of(TEMPLATE, {"form": self.form}, material, None, tokens)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        return await ask(context, self, messages, read_verdict)


def read_verdict(text: str) -> float | None:
    """Convert the model's answer to a reward. Raises InvalidAnswerError."""
    try:
        return _REWARDS[_Verdict.model_validate(last_object(text)).satisfied]
    except ValidationError as error:
        raise InvalidAnswerError('satisfied: expected "yes", "no" or "unclear"') from error
