"""The recorder: converts one model call of a run to the engine's request, and records the engine's answer.

The recorder uses neither HTTP clients nor servers: the transports of ``clients`` call it below our ``openai`` clients,
and ``gateway`` calls it for requests at its own port. Only complete answers are recorded. Token ids and rollout
log-probs come from the engine and are never derived from text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter, time
from typing import Any

from rft_platform.common import json_codec
from rft_platform.common.errors import UserError
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import VERSION_HEADER
from rft_platform.openai_api.calls import CallDefaults, ChatCall, CompletionCall, EndpointCall, StreamedAnswer
from rft_platform.openai_api.errors import is_too_long
from rft_platform.openai_api.responses import ResponsesCall
from rft_platform.openai_api.streams import EventStream, event_chunk
from rft_platform.rollout.recording.history import RunHistory

#: Endpoints whose calls are recorded, below /v1.
ENDPOINTS: dict[str, Callable[[dict[str, Any], CallDefaults], EndpointCall]] = {
    "/chat/completions": ChatCall,
    "/completions": CompletionCall,
    "/responses": ResponsesCall,
}
_BYTES_A_TOKEN = 4  # rough size of a token in a request
_MOST_TOKENS = 1 << 20  # upper limit of the estimate for one choice
_RETRIES = b"x-stainless-retry-count"  # how often an OpenAI client has sent this request before
_IDEMPOTENCY_KEY = b"idempotency-key"  # a client may set this header to name a call that it may retry


Headers = Iterable[tuple[bytes, bytes]]


def recorded_path(path: str) -> str | None:
    """Return the endpoint that a URL's path ends in; ``None`` if its calls are not recorded."""
    return next((suffix for suffix in ENDPOINTS if path.endswith(suffix)), None)


class CallRecorder:
    """Records one request to the engine, and its answer."""

    def __init__(
        self,
        endpoint: str,
        content: bytes,
        headers: Headers,
        history: RunHistory,
        body: dict[str, Any] | None = None,
    ) -> None:
        """``endpoint`` is a result of ``recorded_path``; ``headers`` are those received.

        ``body`` is ``content``, if it has been parsed already. Raises UserError for an invalid request, RunEndedError
        if the run has ended.
        """
        self._history = history
        self._sending = history.begin_call(*_identity(endpoint, content, headers))
        history.client_retries += self._sending.time > 1
        self._env_state_hash = history.env_state_hash
        self._created_at, self._started = time(), perf_counter()
        try:
            self._prepare(endpoint, content, body)
        except (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            history.refuse_call(self._sending)
            self.ended()
            if isinstance(error, UserError):
                raise
            raise UserError(f"the request has a field of the wrong type: {error}") from error

    def _prepare(self, endpoint: str, content: bytes, body: dict[str, Any] | None) -> None:
        """Build the engine's request from the caller's."""
        try:
            body = json_codec.parse_object(content) if body is None else body
        except ValueError as error:
            raise UserError(f"the body must be a JSON object: {error}") from error
        history = self._history
        sampling = {**history.sampling.request_fields(), "seed": history.call_seed(self._sending.order)}
        requested = body.get("model")
        route = history.policies.get(requested) if isinstance(requested, str) else None
        self._policy = DEFAULT_POLICY if route is None else str(requested)
        self.route = route  # None: the first policy; it answers calls with any name that is no further policy's
        model = history.model if route is None else route.model
        self._form = ENDPOINTS[endpoint](body, CallDefaults(model, sampling, history.shown_model))
        self.engine_path = self._form.engine_path
        self.content = json_codec.dump(self._form.sent)
        self.streamed = bool(self._form.sent.get("stream"))
        self.tokens = self._weight()

    def _weight(self) -> int:
        """Rough number of tokens that the call may take; a router uses this number as the load of the call."""
        sent = self._form.sent
        limit = sent.get("max_completion_tokens") or sent.get("max_tokens") or 0
        return self._form.choices * min(int(limit), _MOST_TOKENS) + len(self.content) // _BYTES_A_TOKEN

    def refused(self, status: int, content: bytes) -> None:
        """Record the engine's refusal, and whether the conversation exceeded the context."""
        self._history.refuse_call(self._sending, too_long=is_too_long(status, content.decode(errors="replace")))

    def ended(self) -> None:
        """End the call. The transport calls this when the call is over, with or without an answer."""
        self._history.end_call(self._sending)

    def answered(self, content: bytes, headers: Mapping[str, str]) -> bytes:
        """Record a whole answer; return the answer in the form that the caller requested."""
        answer = json_codec.parse_object(content)
        self._record(answer, headers)
        restored = self._form.restored(answer)
        return content if restored is None else json_codec.dump(restored)

    def event_stream(self, headers: Mapping[str, str]) -> "RecordedEvents":
        """Return an object that records the events of a streamed answer while they are passed to the caller."""
        return RecordedEvents(self, self._form, headers)

    def _record(self, answer: dict[str, Any], headers: Mapping[str, str]) -> None:
        form, sent = self._form, self._form.sent
        calls = [
            ModelCall(
                msg_id=form.msg_id(answer),
                prompt_ids=choice.prompt_ids,
                response_ids=choice.token_ids,
                rollout_logprobs=choice.logprobs,
                finish_reason=choice.finish_reason,
                temperature=float(sent["temperature"]),
                top_p=float(sent["top_p"]),
                top_k=int(sent.get("top_k") or -1),
                messages=form.messages_of(choice.index),
                tools=form.tools,
                response=choice.message,
                policy_version=_policy_version(answer, headers),
                created_at=self._created_at,
                duration_s=perf_counter() - self._started,
                env_state_hash=self._env_state_hash,
                policy=self._policy,
                order=self._sending.order,
                choice=choice.index,
                constrained=bool(answer.get("constrained")),
            )
            for choice in form.sampled(answer)
        ]
        self._history.add(self._sending, calls)


class RecordedEvents:
    """Passes the events of a streamed answer to the caller, and records the answer when every choice has finished."""

    def __init__(self, call: CallRecorder, form: EndpointCall, headers: Mapping[str, str]) -> None:
        self._call = call
        self._form = form
        self._headers = headers
        self._events = EventStream()
        self._answer = StreamedAnswer(form)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the caller's events for the next bytes of the engine's answer."""
        for event in self._events.feed(data):
            chunk = event_chunk(event)
            if chunk is None:
                yield self._form.other_event(event)
                continue
            if self._answer.add(chunk):
                self._call._record(self._answer.whole(), self._headers)
            yield self._form.event(event, chunk)

    def rest(self) -> bytes:
        """Bytes after the last complete event."""
        return self._events.rest()


def _identity(endpoint: str, content: bytes, headers: Headers) -> tuple[tuple[str, object], int, bool]:
    """The key that identifies the request, how often its client sent it before, and if it is an Idempotency-Key."""
    sent_before = 0
    for name, value in headers:
        name = name.lower()
        if name == _IDEMPOTENCY_KEY:
            return (endpoint, value), 0, True
        if name == _RETRIES and value.isdigit():
            sent_before = int(value)
    return (endpoint, hash(content)), sent_before, False


def _policy_version(answer: dict[str, Any], headers: Mapping[str, str]) -> int | None:
    """Version of the weights that answered, from a field of the answer or a header; ``None`` if both are missing."""
    version = answer["policy_version"] if "policy_version" in answer else headers.get(VERSION_HEADER)
    return None if version is None else int(version)
