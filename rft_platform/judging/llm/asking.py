"""Ask a judge model: use a stored answer, or ask within limits and budget and retry until the answer is valid."""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rft_platform.errors import JudgeUnavailableError, UserError
from rft_platform.faults import described
from rft_platform.files import digest_json
from rft_platform.judging.llm.answers import BudgetSpentError
from rft_platform.judging.llm.endpoint import Endpoint, EndpointSettings, Reply
from rft_platform.judging.llm.inert import make_inert
from rft_platform.judging.session import JudgeSession

Answer = TypeVar("Answer")

LONGEST_PAUSE_S = 60.0  #: maximum of the growing pauses between retries
LONGEST_ASKED_PAUSE_S = 600.0  #: maximum of pauses that an endpoint asks for (``Retry-After``)
_SHOWN = 200  # characters of an invalid answer in a message
_log = logging.getLogger(__name__)


class InvalidAnswerError(ValueError):
    """A model's answer does not contain what was asked for."""


class Budget(BaseModel):
    """Limits of judging; null: no limit. Tokens are counted after a call, so the last call may exceed them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: PositiveInt | None = None
    """Requests of one judging (of one round, for example), retries included."""
    tokens: PositiveInt | None = None
    """Tokens of one judging, in prompts and answers."""
    project_calls: PositiveInt | None = None
    """Requests of the whole project, over all processes and restarts."""
    project_tokens: PositiveInt | None = None


class AskingSettings(BaseModel):
    """How to ask a model; the arguments of every judge with a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    """If the answers of all attempts are invalid: ``fail`` the judging, which is retried, or ``drop`` this run."""

    @property
    def request(self) -> dict[str, Any]:
        """The fields of a request besides model and messages."""
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, **self.params}

    @property
    def form(self) -> str:
        """Description of a valid answer."""
        return "one JSON object"


async def ask(
    session: JudgeSession, settings: AskingSettings, messages: list[dict[str, str]], read: Callable[[str], Answer]
) -> Answer:
    """Return the model's answer to ``messages``, parsed by ``read``.

    Raises JudgeUnavailableError after the last attempt, BudgetSpentError, UserError for a model or a key that the
    endpoint does not know, and RuntimeError if it refuses the question or, with ``on_invalid`` ``drop``, all its
    answers are invalid.
    """
    endpoint = session.endpoint(settings.model)
    key = digest_json({"model": endpoint.identity, "messages": messages, "request": settings.request})
    async with session.one_at_a_time(key):
        kept = session.answers.find(key) if settings.cache else None
        if kept is not None:
            with suppress(InvalidAnswerError):  # stored by another judge, with another scale for example
                answer = read(kept)
                session.usage.cached += 1
                return answer
        text, answer = await _answer(session, settings, endpoint, messages, read)
        if settings.cache:
            session.answers.keep(key, endpoint.identity, text)
        return answer


async def _answer(
    session: JudgeSession,
    settings: AskingSettings,
    endpoint: Endpoint,
    messages: list[dict[str, str]],
    read: Callable[[str], Answer],
) -> tuple[str, Answer]:
    asked, said, invalid = messages, "", False
    for attempt in range(settings.retries + 1):
        pause = min(settings.backoff_s * 2**attempt * random.uniform(0.8, 1.2), LONGEST_PAUSE_S)
        try:
            reply = await _one_call(session, settings, endpoint, asked)
            return reply.text, read(reply.text)
        except InvalidAnswerError as error:
            invalid, said, pause = True, str(error), 0.0
            before = make_inert(reply.text, (), endpoint.control_tokens)
            asked = [*messages, {"role": "assistant", "content": before}, _correction(said)]
            said += f"; it answered {reply.text[:_SHOWN]!r}, expected {settings.form}"
        except Exception as error:
            invalid, said = False, _unanswered(error, endpoint)
            pause = max(pause, _asked_pause(error))
        if attempt < settings.retries:
            session.usage.retries += 1
            _log.debug("judge model %s: %s; repeated in %.1f s", endpoint.model, said, pause)
            await asyncio.sleep(pause)
    told = f"the judge's model {endpoint.model!r} gave no valid answer in {settings.retries + 1} attempts: {said}"
    if invalid and settings.on_invalid == "drop":
        raise RuntimeError(told)
    raise JudgeUnavailableError(told)


async def _one_call(
    session: JudgeSession, settings: AskingSettings, endpoint: Endpoint, messages: list[dict[str, str]]
) -> Reply:
    budget, usage = settings.budget, session.usage
    async with session.limit(f"model {endpoint.identity}", settings.concurrency):
        for spent, allowed, name in ((usage.calls, budget.calls, "calls"), (usage.tokens, budget.tokens, "tokens")):
            if allowed is not None and spent >= allowed:
                raise BudgetSpentError(
                    f"the judge's budget is used up: this judging has made {usage.calls:,} calls with {usage.tokens:,} "
                    f"tokens, budget.{name} allows {allowed:,}; raise it and judge again (what was answered is kept)"
                )
        session.answers.reserve_call(session.project, budget.project_calls, budget.project_tokens)
        usage.calls += 1
        reply = await endpoint.ask(messages, settings.request, settings.timeout_s)
        usage.tokens += reply.tokens
        session.answers.count_tokens(session.project, reply.tokens)
        return reply


def _correction(complaint: str) -> dict[str, str]:
    return {"role": "user", "content": f"That is not valid: {complaint}. Answer again, with the JSON object alone."}


def _unanswered(error: Exception, endpoint: Endpoint) -> str:
    """Describe a failed attempt that may be retried; raise errors that no retry can help."""
    import openai

    told = described(error)
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError | openai.NotFoundError):
        raise UserError(
            f"the judge's model {endpoint.model!r} is not to be had at {endpoint.client.base_url}: {told}; set model, "
            "base_url and api_key_env right"
        ) from error
    if isinstance(error, openai.BadRequestError | openai.UnprocessableEntityError):
        raise RuntimeError(f"the judge's model {endpoint.model!r} refuses the question: {told}") from error
    if not isinstance(error, openai.APIError):
        raise error
    return told


def _asked_pause(error: Exception) -> float:
    """Seconds that the endpoint asks to wait, given as a number or a date, at most LONGEST_ASKED_PAUSE_S."""
    response = getattr(error, "response", None)
    given = response.headers.get("retry-after", "").strip() if response is not None else ""
    if given.replace(".", "", 1).isdigit():
        asked = float(given)
    else:
        try:
            asked = (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):  # neither, or a date without a zone
            return 0.0
    return min(max(asked, 0.0), LONGEST_ASKED_PAUSE_S)
