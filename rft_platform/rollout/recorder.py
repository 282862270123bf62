"""The recorder: one model call of a run, whatever road it came on, from the caller's request to the rows it leaves.

It knows neither HTTP clients nor servers. The transports of ``recording`` put it below our ``openai`` clients, and
``gateway`` behind a port of its own. Only an answer that reached the caller is recorded, token for token as the engine
sampled it: ids and log-probs are the engine's, never made from text.
"""

from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter, time
from typing import Any

from rft_platform.errors import UserError
from rft_platform.inference.serving import json_codec
from rft_platform.inference.serving.context_limit import is_too_long
from rft_platform.rollout.endpoints import events
from rft_platform.rollout.endpoints.chat import ChatCall
from rft_platform.rollout.endpoints.completions import CompletionCall
from rft_platform.rollout.endpoints.endpoint import CallDefaults, Endpoint
from rft_platform.rollout.endpoints.responses import ResponsesCall
from rft_platform.rollout.history import RecordedCall, RunHistory

#: Whose calls are recorded, below /v1.
ENDPOINTS: dict[str, type[Endpoint]] = {
    "/chat/completions": ChatCall,
    "/completions": CompletionCall,
    "/responses": ResponsesCall,
}
_VERSION_HEADER = "x-policy-version"
_BYTES_A_TOKEN = 4  # of a request, roughly
_MOST_TOKENS = 1 << 20  # that an answer may count for
_RETRIES = b"x-stainless-retry-count"  # how often an OpenAI client has sent this request before
_IDEMPOTENCY_KEY = b"idempotency-key"  # by which any client may name a call that it will repeat


Headers = Iterable[tuple[bytes, bytes]]


def recorded_path(path: str) -> str | None:
    """The endpoint that a URL's path ends in; ``None`` where its calls are not recorded."""
    return next((suffix for suffix in ENDPOINTS if path.endswith(suffix)), None)


class ModelCall:
    """One request on its way out, and its answer on the way back."""

    def __init__(self, endpoint: str, content: bytes, headers: Headers, history: RunHistory) -> None:
        """``endpoint`` as ``recorded_path`` gives it; ``headers`` as they came.

        Raises UserError for what cannot be asked, RunEndedError where the run is over.
        """
        self._history = history
        self._sending = history.begin_call(*_identity(endpoint, content, headers))
        history.client_retries += self._sending.time > 1
        self._env_state_hash = history.env_state_hash
        self._created_at, self._started = time(), perf_counter()
        try:
            self._prepare(endpoint, content)
        except (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            history.refuse_call(self._sending)
            self.ended()
            if isinstance(error, UserError):
                raise
            raise UserError(f"the request has a field of the wrong type: {error}") from error

    def _prepare(self, endpoint: str, content: bytes) -> None:
        """Make the engine's request out of the caller's."""
        try:
            body = json_codec.parse_object(content)
        except ValueError as error:
            raise UserError(f"the body must be a JSON object: {error}") from error
        history = self._history
        seed = history.call_seed(self._sending.order)
        asked = body.get("model")
        road = history.policies.get(asked) if isinstance(asked, str) else None
        self._policy = None if road is None else asked
        self.road = road  # None: the first policy, as for any other name
        model = history.model if road is None else road.model
        self._form = ENDPOINTS[endpoint](body, CallDefaults(model, history.sampling, seed))
        self.engine_path = self._form.engine_path
        self.content = json_codec.dump(self._form.sent)
        self.streamed = bool(self._form.sent.get("stream"))
        self.tokens = self._weight()

    def _weight(self) -> int:
        """How many tokens the call may take, roughly: what a router weighs it by."""
        sent = self._form.sent
        limit = sent.get("max_completion_tokens") or sent.get("max_tokens") or 0
        return self._form.choices * min(int(limit), _MOST_TOKENS) + len(self.content) // _BYTES_A_TOKEN

    def refused(self, status: int, content: bytes) -> None:
        """The engine refuses the call; noted where the conversation has outgrown the context."""
        self._history.refuse_call(self._sending, too_long=is_too_long(status, content.decode(errors="replace")))

    def ended(self) -> None:
        """Nothing more will come: the transport is done with the call, whatever came of it."""
        self._history.end_call(self._sending)

    def answered(self, content: bytes, headers: Mapping[str, str]) -> bytes:
        """Record a whole answer; returns what the caller gets."""
        answer = json_codec.parse_object(content)
        self._record(answer, headers)
        restored = self._form.restored(answer)
        return content if restored is None else json_codec.dump(restored)

    def event_stream(self, headers: Mapping[str, str]) -> "RecordedEvents":
        """What reads the events of a streamed answer as they pass."""
        return RecordedEvents(self, self._form, headers)

    def _record(self, answer: dict[str, Any], headers: Mapping[str, str]) -> None:
        sent, form = self._form.sent, self._form
        common: dict[str, Any] = {
            "order": self._sending.order,
            "msg_id": form.msg_id(answer),
            "policy_version": _policy_version(answer, headers),
            "temperature": float(sent["temperature"]),
            "top_p": float(sent["top_p"]),
            "top_k": int(sent.get("top_k") or -1),
            "tools": form.tools,
            "created_at": self._created_at,
            "duration_s": perf_counter() - self._started,
            "env_state_hash": self._env_state_hash,
            "policy": self._policy,
            "constrained": bool(answer.get("constrained")),
        }
        calls = [
            RecordedCall(
                **common,
                choice=choice.index,
                prompt_ids=choice.prompt_ids,
                response_ids=choice.token_ids,
                logprobs=choice.logprobs,
                finish_reason=choice.finish_reason,
                messages=form.messages_of(choice.index),
                response=choice.message,
            )
            for choice in form.sampled(answer)
        ]
        self._history.add(self._sending, calls)


class RecordedEvents:
    """The events of a streamed answer: recorded once every choice has finished, passed on as asked for."""

    def __init__(self, call: ModelCall, form: Endpoint, headers: Mapping[str, str]) -> None:
        self._call = call
        self._form = form
        self._headers = headers
        self._events = events.EventStream()
        self._answer = form.assembled()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What the caller gets for the next bytes."""
        for event in self._events.feed(data):
            chunk = events.event_chunk(event)
            if chunk is None:
                yield self._form.other_event(event)
                continue
            if self._answer.add(chunk):
                self._call._record(self._answer.whole(), self._headers)
            yield self._form.event(event, chunk)

    def rest(self) -> bytes:
        """What came after the last complete event."""
        return self._events.rest()


def _identity(endpoint: str, content: bytes, headers: Headers) -> tuple[tuple[str, object], int, bool]:
    """What is asked, how often it was sent before by its client's count, and whether the client has named it."""
    sent_before = 0
    for name, value in headers:
        name = name.lower()
        if name == _IDEMPOTENCY_KEY:
            return (endpoint, value), 0, True
        if name == _RETRIES and value.isdigit():
            sent_before = int(value)
    return (endpoint, hash(content)), sent_before, False


def _policy_version(answer: dict[str, Any], headers: Mapping[str, str]) -> int | None:
    """The version of the weights that answered: a field of the answer or a header; ``None`` where there is neither."""
    version = answer["policy_version"] if "policy_version" in answer else headers.get(_VERSION_HEADER)
    return None if version is None else int(version)
