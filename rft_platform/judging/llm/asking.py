"""Ask a judge model: use a stored answer, or send requests within limits and budget until an answer is valid.

``last_object`` extracts the JSON object from an answer, ``read_scores`` its scores.
"""

import asyncio
import json
import logging
import random
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from rft_platform.common.errors import JudgeUnavailableError, UserError
from rft_platform.common.fault_classification import described
from rft_platform.common.files import digest_json
from rft_platform.judging.inert_text import make_inert
from rft_platform.judging.judge_context import JUDGE, BudgetSpentError, Endpoint, EndpointSettings, JudgeContext, Reply

Answer = TypeVar("Answer")

LONGEST_PAUSE_S = 60.0  #: maximum of the growing pauses between retries
LONGEST_ASKED_PAUSE_S = 600.0  #: maximum of pauses that an endpoint asks for (``Retry-After``)
_SHOWN = 200  # characters of an invalid answer in a message
_log = logging.getLogger(__name__)


class InvalidAnswerError(ValueError):
    """A model's answer does not have the requested form."""


class Budget(BaseModel):
    """Limits of a judge pass; null: no limit. The last call may exceed a token limit: tokens are counted after it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: PositiveInt | None = None
    """Maximum requests of one judge pass (for example of one round), retries included."""
    tokens: PositiveInt | None = None
    """Maximum tokens of one judge pass, in prompts and answers."""
    project_calls: PositiveInt | None = None
    """Maximum requests of the whole project, over all processes and restarts."""
    project_tokens: PositiveInt | None = None


class AskingSettings(BaseModel):
    """How to ask a model: arguments that every judge with a model has."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    role: ClassVar[str] = JUDGE  # what the model is for, in messages

    model: str | EndpointSettings
    """An auxiliary model's name, or ``{base_url, model, api_key_env}``."""
    temperature: NonNegativeFloat = 0.0
    max_tokens: PositiveInt = 512
    params: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, such as ``response_format``."""
    timeout_s: PositiveFloat = 120.0
    """Time limit of one attempt, in seconds."""
    retries: NonNegativeInt = 4
    """Retries after an attempt that failed or whose answer is invalid."""
    backoff_s: NonNegativeFloat = 1.0
    """Seconds before the first retry; each further pause is twice as long."""
    concurrency: PositiveInt = 8
    """Maximum number of concurrent requests."""
    cache: bool = True
    """Store answers, and use stored ones."""
    budget: Budget = Budget()
    on_invalid: Literal["fail", "drop"] = "fail"
    """If the answers of all attempts are invalid: ``fail`` ends the judge pass with an error, and the launch is
    retried; ``drop`` leaves this run out."""

    @property
    def request(self) -> dict[str, Any]:
        """The fields of a request besides model and messages."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, **self.params}

    @property
    def form(self) -> str:
        """Description of a valid answer."""
        return "one JSON object"


async def ask(
    context: JudgeContext, settings: AskingSettings, messages: list[dict[str, str]], read: Callable[[str], Answer]
) -> Answer:
    """Return the model's answer to ``messages``, parsed by ``read``.

    Raises:
        JudgeUnavailableError: no attempt gave a valid answer.
        BudgetSpentError: the budget is used up.
        UserError: the endpoint does not know the model or the key.
        RuntimeError: the endpoint refuses the question, or all answers are invalid and ``on_invalid`` is ``drop``.
    """
    endpoint = context.endpoint(settings.model)
    key = digest_json({"model": endpoint.identity, "messages": messages, "request": settings.request})
    async with context.one_at_a_time(key):
        kept = context.answers.find(key) if settings.cache else None
        if kept is not None:
            with suppress(InvalidAnswerError):  # another judge may have stored it, for example with another scale
                answer = read(kept)
                context.usage.cached += 1
                return answer
        text, answer = await _answer(context, settings, endpoint, messages, read)
        if settings.cache:
            context.answers.keep(key, endpoint.identity, text)
        return answer


async def _answer(
    context: JudgeContext,
    settings: AskingSettings,
    endpoint: Endpoint,
    messages: list[dict[str, str]],
    read: Callable[[str], Answer],
) -> tuple[str, Answer]:
    conversation, problem, invalid = messages, "", False
    for attempt in range(settings.retries + 1):
        pause = min(settings.backoff_s * 2**attempt * random.uniform(0.8, 1.2), LONGEST_PAUSE_S)
        try:
            reply = await _one_call(context, settings, endpoint, conversation)
            return reply.text, read(reply.text)
        except InvalidAnswerError as error:
            invalid, problem, pause = True, str(error), 0.0
            before = make_inert(reply.text, (), endpoint.control_tokens)
            conversation = [*messages, {"role": "assistant", "content": before}, _correction(problem)]
            problem += f"; it answered {reply.text[:_SHOWN]!r}, expected {settings.form}"
        except Exception as error:
            invalid, problem = False, _failed_request(error, endpoint, settings.role)
            pause = max(pause, _requested_pause(error))
        if attempt < settings.retries:
            context.usage.retries += 1
            _log.debug("judge model %s: %s; retried in %.1f s", endpoint.model, problem, pause)
            await asyncio.sleep(pause)
    message = f"{settings.role} {endpoint.model!r} gave no valid answer in {settings.retries + 1} attempts: {problem}"
    if invalid and settings.on_invalid == "drop":
        raise RuntimeError(message)
    raise JudgeUnavailableError(message)


async def _one_call(
    context: JudgeContext, settings: AskingSettings, endpoint: Endpoint, messages: list[dict[str, str]]
) -> Reply:
    budget, usage = settings.budget, context.usage
    async with context.limit(f"model {endpoint.identity}", settings.concurrency):
        for spent, allowed, name in ((usage.calls, budget.calls, "calls"), (usage.tokens, budget.tokens, "tokens")):
            if allowed is not None and spent >= allowed:
                raise BudgetSpentError(
                    f"the judge's budget is used up: this judge pass has made {usage.calls:,} calls with at least "
                    f"{usage.tokens:,} tokens (those of outstanding answers are not known yet), budget.{name} allows "
                    f"{allowed:,}; raise it and judge again (received answers are kept)"
                )
        context.answers.reserve_call(context.project, budget.project_calls, budget.project_tokens)
        usage.calls += 1
        reply = await endpoint.ask(messages, settings.request, settings.timeout_s)
        usage.tokens += reply.tokens
        context.answers.count_tokens(context.project, reply.tokens)
        return reply


def _correction(complaint: str) -> dict[str, str]:
    return {"role": "user", "content": f"That is not valid: {complaint}. Answer again, with the JSON object alone."}


def _failed_request(error: Exception, endpoint: Endpoint, role: str) -> str:
    """Describe a failed attempt that may be retried; raise errors that no retry can help."""
    import openai

    message = described(error)
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError | openai.NotFoundError):
        raise UserError(
            f"{role} {endpoint.model!r} cannot be reached at {endpoint.client.base_url}: {message}; correct model, "
            "base_url and api_key_env"
        ) from error
    if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError):
        raise RuntimeError(f"{role} {endpoint.model!r} refuses the question: {message}") from error
    if not isinstance(error, openai.APIError):
        raise error
    return message


def _requested_pause(error: Exception) -> float:
    """Seconds to wait according to the endpoint (a number or a date), at most LONGEST_ASKED_PAUSE_S."""
    response = getattr(error, "response", None)
    retry_after = response.headers.get("retry-after", "").strip() if response is not None else ""
    if retry_after.replace(".", "", 1).isdigit():
        pause = float(retry_after)
    else:
        try:
            pause = (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):  # neither a number nor a date, or a date without a time zone
            return 0.0
    return min(max(pause, 0.0), LONGEST_ASKED_PAUSE_S)


_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_START = re.compile(r'\{(?=\s*["}])')
_DECODER = json.JSONDecoder()
#: Only this many characters at the end of an answer are searched for the object, to bound the time.
LONGEST_OBJECT = 1 << 15


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text, which may have reasoning, words or a fence around it.

    Raises InvalidAnswerError if there is none, and for JSON that is nested too deep for Python.
    """
    text, found, position = _without_thoughts(text)[-LONGEST_OBJECT:], None, 0
    while (start := _START.search(text, position)) is not None:
        try:
            found, position = _DECODER.raw_decode(text, start.start())
        except ValueError:
            position = start.end()
        except RecursionError:
            raise InvalidAnswerError("its JSON is nested too deep") from None
    if found is None:
        raise InvalidAnswerError("it holds no JSON object")
    return found


def read_scores(text: str, names: Collection[str], kind: Any) -> dict[str, Any]:
    """Return the scores in an answer's JSON object, in the order of ``names``.

    Raises InvalidAnswerError if a name has no score, another name has one, or a score is not of type ``kind``.
    """
    try:
        scores = TypeAdapter(dict[str, kind]).validate_python(last_object(text).get("scores"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("scores", *first["loc"])))
        raise InvalidAnswerError(f"{place}: {first['msg']}, got {first['input']!r:.80}") from error
    if scores.keys() != set(names):
        raise InvalidAnswerError(f"scores: expected {', '.join(names)}, got {', '.join(scores) or 'none':.80}")
    return {name: scores[name] for name in names}


def _without_thoughts(text: str) -> str:
    kept, position = [], 0
    while (start := text.find(_THOUGHT, position)) >= 0 and (end := text.find(_THOUGHT_END, start)) >= 0:
        kept.append(text[position:start])
        position = end + len(_THOUGHT_END)
    return "".join([*kept, text[position:]])
