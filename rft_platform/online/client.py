"""``OnlineClient`` and ``AsyncOnlineClient``: the official OpenAI clients of a served policy, with feedback and commit.

    with OnlineClient("http://127.0.0.1:8010") as client:
        answer = client.chat.completions.create(model="policy", messages=[...])
        client.feedback(answer, reward=1.0)

Feedback has an id, so a request that is repeated after a lost connection counts once. Leaving the block commits.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

import openai
from openai.resources.chat import AsyncChat, Chat

from rft_platform.common.errors import UserError
from rft_platform.online.feedback import (
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


@dataclass(frozen=True, slots=True)
class _Requests:
    """Addresses and bodies of the service's own routes."""

    root: str
    form: FeedbackForm

    @property
    def feedback_url(self) -> str:
        return f"{self.root}/feedback"

    @property
    def commit_url(self) -> str:
        return f"{self.root}/commit"

    def commit(self, task_id: str | None, run_id: str | None, max_age_s: float | None) -> dict[str, Any]:
        age = None if max_age_s is None else round(1000 * max_age_s)
        return {"task_id": task_id, "run_id": run_id, "time_threshold": age}


def _options(base_url: str, api_key: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    root = base_url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise UserError(f"base_url {base_url!r}: expected http://HOST:PORT of the service")
    return root, {"base_url": f"{root}/v1", "api_key": api_key, **given}


def _headers(place: Place, subject: str | None) -> dict[str, str]:
    named = {header: getattr(place, name) for name, header in _HEADERS.items()} | {_SUBJECT: subject}
    headers = {header: value for header, value in named.items() if value is not None}
    for header, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise UserError(f"{header} {value!r}: expected printable ASCII characters")
    return headers


def _unknown(error: openai.NotFoundError) -> FeedbackResult:
    """The answer to a feedback whose answers are all unknown; raises ``error`` if it is another one."""
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


class _Shared(Generic[_Client]):
    """What both clients share: the OpenAI client ``openai``, whose calls the service records, and a run's place."""

    openai: _Client
    _kind: ClassVar[Callable[..., Any]]  # class of ``openai``

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str = "EMPTY",
        *,
        metrics: Iterable[Metric] = (),
        commit_at_exit: bool = True,
        **openai_options: Any,
    ) -> None:
        """``metrics``: what feedback may name beside ``reward``. Further options are those of the OpenAI client."""
        root, options = _options(base_url, api_key, openai_options)
        self.openai = self._kind(**options)
        self.place = Place()
        self._requests = _Requests(root, FeedbackForm(metrics))
        self._commits = commit_at_exit

    def run(
        self,
        task_id: str | None = None,
        run_id: str | None = None,
        *,
        conversation_id: str | None = None,
        subject: str | None = None,
    ) -> Self:
        """A client whose calls belong to one run or conversation; feedback without answers is about all of them.

        ``subject`` names the person whose data the calls hold. Closing the result closes nothing.
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
        return self._requests.form.body(answers, place, **fields)


class OnlineClient(_Shared[openai.OpenAI]):
    """A client of the online service. ``openai`` is an ordinary ``openai.OpenAI`` whose calls the service records."""

    _kind = openai.OpenAI

    @property
    def chat(self) -> Chat:
        """Chat completions, as of ``openai.OpenAI``."""
        return self.openai.chat

    def feedback(self, answers: Answers | None = None, **fields: Any) -> FeedbackResult:
        """Report how good answers, a run or a conversation were; a repeated ``feedback_id`` changes nothing.

        ``fields``: ``reward``, ``metrics`` (value by declared name), ``comment``, ``correction``, ``tags``,
        ``feedback_id``, ``choice`` (the index of one choice of answers with several), ``task_id``, ``run_id``,
        ``conversation_id``. Feedback may come at any time; the result counts
        as late what was committed before. Raises UnknownAnswersError if the service knows none of the answers.
        """
        return _total([self._send_feedback(body) for body in self._bodies(answers, fields)])

    def commit(
        self, *, task_id: str | None = None, run_id: str | None = None, max_age_s: float | None = None
    ) -> CommitResult:
        """Hand labelled calls to training; without arguments all of them."""
        body = self._requests.commit(task_id, run_id, max_age_s)
        answer: Any = self.openai.post(self._requests.commit_url, body=body, cast_to=object)
        return CommitResult.of(answer)

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
            answer: Any = self.openai.post(self._requests.feedback_url, body=body, cast_to=object)
        except openai.NotFoundError as error:
            return _unknown(error)
        return FeedbackResult.of(answer)


class AsyncOnlineClient(_Shared[openai.AsyncOpenAI]):
    """``OnlineClient`` for asyncio: the same methods, awaited; ``openai`` is an ``openai.AsyncOpenAI``."""

    _kind = openai.AsyncOpenAI

    @property
    def chat(self) -> AsyncChat:
        """Chat completions, as of ``openai.AsyncOpenAI``."""
        return self.openai.chat

    async def feedback(self, answers: Answers | None = None, **fields: Any) -> FeedbackResult:
        """See ``OnlineClient.feedback``."""
        return _total([await self._send_feedback(body) for body in self._bodies(answers, fields)])

    async def commit(
        self, *, task_id: str | None = None, run_id: str | None = None, max_age_s: float | None = None
    ) -> CommitResult:
        """See ``OnlineClient.commit``."""
        body = self._requests.commit(task_id, run_id, max_age_s)
        answer: Any = await self.openai.post(self._requests.commit_url, body=body, cast_to=object)
        return CommitResult.of(answer)

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
            answer: Any = await self.openai.post(self._requests.feedback_url, body=body, cast_to=object)
        except openai.NotFoundError as error:
            return _unknown(error)
        return FeedbackResult.of(answer)
