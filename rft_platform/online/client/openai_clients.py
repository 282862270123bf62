"""``OnlineClient`` and ``AsyncOnlineClient``: the official OpenAI clients of a served policy, with feedback and commit.

    with OnlineClient("http://127.0.0.1:8010") as client:
        answer = client.chat.completions.create(model="policy", messages=[...])
        client.feedback(answer, reward=1.0)

Each feedback has an id, so a feedback that is sent again after a lost connection counts once. At the end of the block
the client commits. A feedback or commit above the service's rate limit waits and is sent again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from copy import copy
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

import openai
from openai.resources import AsyncCompletions, Completions
from openai.resources.chat import AsyncChat, Chat
from openai.resources.responses import AsyncResponses, Responses

from rft_platform.common.errors import UserError
from rft_platform.online.client.feedback import (
    Answers,
    CommitResult,
    FeedbackForm,
    FeedbackResult,
    Metric,
    Place,
)

LOG = logging.getLogger(__name__)
DEFAULT_URL = "http://127.0.0.1:8010"

_Client = TypeVar("_Client", openai.OpenAI, openai.AsyncOpenAI)
_HEADERS = {"task_id": "x-rft-task", "run_id": "x-rft-run", "conversation_id": "x-rft-conversation"}
_SUBJECT = "x-rft-subject"
_SHORTEST_WAIT_S = 0.1
_RETRIES = 6  # last about 20 s, longer than a restart of the service; OpenAI's two last 1.5 s
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0  # between the retries after a failure, as in OpenAI's client
_SENT_ONCE: openai.RequestOptions = {"max_retries": 0}
_MARK: ContextVar[str | None] = ContextVar("mark", default=None)


def _commit_body(task_id: str | None, run_id: str | None, max_age_s: float | None) -> dict[str, Any]:
    """The body of a commit request; the service expects ``max_age_s`` in milliseconds."""
    age = None if max_age_s is None else round(1000 * max_age_s)
    return {"task_id": task_id, "run_id": run_id, "time_threshold": age}


def _options(base_url: str, api_key: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    root = base_url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise UserError(f"base_url {base_url!r}: expected http://HOST:PORT of the service")
    return root, {"base_url": f"{root}/v1", "api_key": api_key, "max_retries": _RETRIES, **given}


def _headers(place: Place, subject: str | None) -> dict[str, str]:
    named = {header: getattr(place, name) for name, header in _HEADERS.items()} | {_SUBJECT: subject}
    headers = {header: value for header, value in named.items() if value is not None}
    for header, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise UserError(f"{header} {value!r}: expected printable ASCII characters")
    return headers


def _unknown(error: openai.NotFoundError) -> FeedbackResult:
    """The result of a feedback that names only unknown answers; raises ``error`` if the 404 has another cause."""
    try:
        body = error.response.json()
    except ValueError:
        raise error from None
    if not isinstance(body, dict) or body.get("status") != "unknown":
        raise error
    return FeedbackResult.of(body)


def _total(results: Iterable[FeedbackResult]) -> FeedbackResult:
    found = list(results)
    return FeedbackResult(
        matched=max(each.matched for each in found),
        duplicate=max(each.duplicate for each in found),
        late=max(each.late for each in found),
        unknown=found[0].unknown,
    )


class _Retries:
    """Decides when a feedback or commit is sent again; a request that arrives twice counts once.

    The retries of OpenAI's client are turned off for both kinds of request, because they have no time limit.
    """

    def __init__(self, longest_s: float, most: int) -> None:
        self._deadline = time.monotonic() + longest_s
        self._most = most  # maximum number of retries after failures other than the rate limit
        self._failures = 0

    def pause_s(self, error: openai.APIError) -> float:
        """Seconds until the request may be sent again; raises ``error`` if it may not, or not within the limit."""
        if isinstance(error, openai.RateLimitError):
            pause = max(_SHORTEST_WAIT_S, _retry_after_s(error))
            if time.monotonic() + pause > self._deadline:
                raise error
            return pause
        if self._failures >= self._most or not _is_transient(error):
            raise error
        self._failures += 1
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._failures - 1))


def _retry_after_s(error: openai.RateLimitError) -> float:
    try:
        return float(error.response.headers.get("retry-after", "1"))
    except ValueError:  # the header has a date, which HTTP also permits
        return 1.0


def _is_transient(error: openai.APIError) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code == 408 or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


class _Shared(Generic[_Client]):
    """Base of both clients: the OpenAI client ``openai``, whose calls the service records, and the ids of a run."""

    openai: _Client
    _kind: ClassVar[Callable[..., Any]]  # class of ``openai``

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str = "EMPTY",
        *,
        metrics: Iterable[Metric] = (),
        commit_at_exit: bool = True,
        rate_limit_wait_s: float = 60.0,
        **openai_options: Any,
    ) -> None:
        """``metrics``: metrics that feedback may have besides ``reward``. Further options go to the OpenAI client.

        A feedback or commit that gets status 429 is sent again after ``Retry-After``, until ``rate_limit_wait_s``
        seconds have passed. After another failure it is sent again at most ``max_retries`` times (6), an option of
        the OpenAI client.
        """
        self._root, options = _options(base_url, api_key, openai_options)
        self.openai = self._kind(**options)
        self.place = Place()
        self._form = FeedbackForm(metrics)
        self._commits = commit_at_exit
        self._rate_limit_wait_s = rate_limit_wait_s

    def run(
        self,
        task_id: str | None = None,
        run_id: str | None = None,
        *,
        conversation_id: str | None = None,
        subject: str | None = None,
    ) -> Self:
        """A client whose calls belong to one run or conversation; feedback without answers is about all its calls.

        ``subject`` names the person whose data the calls hold. The result uses this client's connections: closing the
        result does not close them.
        """
        scoped = copy(self)
        scoped.place = self._place({"task_id": task_id, "run_id": run_id, "conversation_id": conversation_id})
        scoped.openai = self.openai.with_options(default_headers=_headers(scoped.place, subject))
        scoped._commits = False
        return scoped

    def _place(self, given: Mapping[str, str | None]) -> Place:
        return Place(**{name: given.get(name) or getattr(self.place, name) for name in Place.__dataclass_fields__})

    def _bodies(self, answers: Answers | None, fields: dict[str, Any]) -> list[dict[str, Any]]:
        place = self._place({name: fields.pop(name, None) for name in Place.__dataclass_fields__})
        return self._form.body(answers, place, **fields)


class OnlineClient(_Shared[openai.OpenAI]):
    """A client of the online service. ``openai`` is an ordinary ``openai.OpenAI`` whose calls the service records."""

    _kind = openai.OpenAI

    @property
    def chat(self) -> Chat:
        """Chat completions, as in ``openai.OpenAI``."""
        return self.openai.chat

    @property
    def completions(self) -> Completions:
        """Completions of texts, as in ``openai.OpenAI``."""
        return self.openai.completions

    @property
    def responses(self) -> Responses:
        """Responses, as in ``openai.OpenAI``."""
        return self.openai.responses

    def feedback(self, answers: Answers | None = None, **fields: Any) -> FeedbackResult:
        """Report how good answers, a run or a conversation were; a repeated ``feedback_id`` changes nothing.

        ``fields``: ``reward``, ``metrics`` (value by declared name), ``comment``, ``correction``, ``tags``,
        ``feedback_id``, ``choice`` (the index of one choice of answers with several), ``task_id``, ``run_id``,
        ``conversation_id``. Feedback may be given at any time; the result counts answers that were committed before
        as late. Raises UnknownAnswersError if the service knows none of the answers.
        """
        return _total([self._send_feedback(body) for body in self._bodies(answers, fields)])

    def commit(
        self, *, task_id: str | None = None, run_id: str | None = None, max_age_s: float | None = None
    ) -> CommitResult:
        """Commit labelled calls for training; without arguments all labelled calls."""
        body = _commit_body(task_id, run_id, max_age_s)
        return CommitResult.of(self._post("commit", body))

    def close(self) -> None:
        """Close the connections."""
        self.openai.close()

    def __enter__(self) -> "OnlineClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._commits:
                self.commit()
        except openai.OpenAIError:
            if error is None:
                raise
            LOG.warning("the commit at the end of a failed block failed as well", exc_info=True)
        finally:
            if self._commits:
                self.close()

    def _send_feedback(self, body: dict[str, Any]) -> FeedbackResult:
        try:
            return FeedbackResult.of(self._post("feedback", body))
        except openai.NotFoundError as error:
            return _unknown(error)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        retries = _Retries(self._rate_limit_wait_s, self.openai.max_retries)
        while True:
            try:
                return self.openai.post(f"{self._root}/{path}", body=body, cast_to=object, options=_SENT_ONCE)
            except openai.APIError as error:
                time.sleep(retries.pause_s(error))


class AsyncOnlineClient(_Shared[openai.AsyncOpenAI]):
    """``OnlineClient`` for asyncio: the same methods, awaited; ``openai`` is an ``openai.AsyncOpenAI``."""

    _kind = openai.AsyncOpenAI

    @property
    def chat(self) -> AsyncChat:
        """Chat completions, as in ``openai.AsyncOpenAI``."""
        return self.openai.chat

    @property
    def completions(self) -> AsyncCompletions:
        """Completions of texts, as in ``openai.AsyncOpenAI``."""
        return self.openai.completions

    @property
    def responses(self) -> AsyncResponses:
        """Responses, as in ``openai.AsyncOpenAI``."""
        return self.openai.responses

    async def feedback(self, answers: Answers | None = None, **fields: Any) -> FeedbackResult:
        """See ``OnlineClient.feedback``."""
        return _total([await self._send_feedback(body) for body in self._bodies(answers, fields)])

    async def commit(
        self, *, task_id: str | None = None, run_id: str | None = None, max_age_s: float | None = None
    ) -> CommitResult:
        """See ``OnlineClient.commit``."""
        body = _commit_body(task_id, run_id, max_age_s)
        return CommitResult.of(await self._post("commit", body))

    async def close(self) -> None:
        """Close the connections."""
        await self.openai.close()

    async def __aenter__(self) -> "AsyncOnlineClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._commits:
                await self.commit()
        except openai.OpenAIError:
            if error is None:
                raise
            LOG.warning("the commit at the end of a failed block failed as well", exc_info=True)
        finally:
            if self._commits:
                await self.close()

    async def _send_feedback(self, body: dict[str, Any]) -> FeedbackResult:
        try:
            return FeedbackResult.of(await self._post("feedback", body))
        except openai.NotFoundError as error:
            return _unknown(error)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        retries = _Retries(self._rate_limit_wait_s, self.openai.max_retries)
        while True:
            try:
                return await self.openai.post(f"{self._root}/{path}", body=body, cast_to=object, options=_SENT_ONCE)
            except openai.APIError as error:
                await asyncio.sleep(retries.pause_s(error))


def mark(*labels: str) -> None:
    """Mark the next request of this thread or asyncio task for training."""
    _MARK.set(",".join(labels) or "marked")


def take_mark() -> str | None:
    """Return the mark of the next request and remove it."""
    found = _MARK.get()
    _MARK.set(None)
    return found
