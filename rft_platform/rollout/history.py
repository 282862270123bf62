"""The model calls of one run, kept apart from every other run's by being an object of its own."""

import math
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rft_platform.errors import EngineError, UserCodeError
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.call_places import CallPlaces, Sending
from rft_platform.rollout.identity import derive_seed
from rft_platform.rollout.policies import PolicyRoad


@dataclass(slots=True)
class RecordedCall:
    """One choice of one model call of a run, token for token as the engine sampled it.

    A workflow may set ``reward``, ``step_reward``, ``metrics`` and ``env_state_hash``; all else is a fact.
    """

    order: int  # the call's place among the calls of its run, by the time it was sent
    choice: int
    msg_id: str
    policy_version: int | None  # None where the engine does not stamp its answers
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    temperature: float
    top_p: float
    top_k: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    response: dict[str, Any]
    created_at: float
    duration_s: float
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    env_state_hash: str | None = None  # of the environment's state that the call answers
    policy: str | None = None  # which further trainable policy answered; None: the project's first
    step_reward: float | None = None  # what the environment gave for this step alone
    constrained: bool = False  # sampled under a grammar: the log-probs are of a masked distribution

    @property
    def response_text(self) -> str:
        """The text of the answer; empty where it is nothing but tool calls."""
        return self.response.get("content") or ""


class RunEndedError(EngineError):
    """A model call of a run that is over."""


class RunHistory:
    """What one run asked of the policy. Filled by the recorder from any thread, read when the run has ended."""

    def __init__(
        self,
        model: str,
        sampling: SamplingParams,
        seed: int,
        key: str = "",
        policies: Mapping[str, PolicyRoad] | None = None,
    ) -> None:
        """``model`` is the policy's name at the engine; ``sampling`` and ``seed`` hold where a call names none.

        ``key`` names the run, as ``<batch>/<task>/<run>``, to agents outside of this process. ``policies`` are further
        trainable ones, by the names that calls give as their model.
        """
        self.model = model
        self.policies = dict(policies or {})
        self.key = key
        self.sampling = sampling
        self.client_retries = 0
        self.env_state_hash: str | None = None  # of the environment's state now, as the workflow told it last
        self.connection_lost = False  # the engine could not be reached at least once
        self.context_exceeded = False  # the engine refused a prompt as longer than the context, and no call came after
        self._seed = seed
        self._calls: list[RecordedCall] = []
        self._extracted = 0
        self._closed = False
        self._places = CallPlaces()
        self._lock = threading.Lock()

    def begin_call(self, asked: Hashable = None, sent_before: int = 0, named: bool = False) -> Sending:
        """A call that is about to be sent; raises RunEndedError once the run is over.

        ``asked`` identifies the request. Where its client has sent it ``sent_before`` times already, or ``named`` it as
        it named an earlier one, it is the same call again: same place, same seed, and its answer takes the place of one
        that was lost on the way. ``end_call`` must follow.
        """
        with self._lock:
            if self._closed:
                raise RunEndedError("this run has ended: a model call made after its workflow returned is not served")
            self.context_exceeded = False  # of an earlier call, which the workflow got over
            return self._places.take(asked, sent_before, named)

    def refuse_call(self, sending: Sending, too_long: bool = False) -> None:
        """The call is refused; ``too_long``: by the engine, because the conversation has outgrown the context."""
        with self._lock:
            if sending.counts:
                sending.place.refused = True
                self.context_exceeded = self.context_exceeded or too_long

    def end_call(self, sending: Sending) -> None:
        """Nothing more will come of this sending."""
        with self._lock:
            if sending.counts:
                sending.place.under_way = False

    @property
    def unfinished_calls(self) -> int:
        """Calls without an answer that is recorded, and not refused: broken off by the agent, or still under way."""
        with self._lock:
            return self._places.unfinished

    def call_seed(self, order: int) -> int:
        """Sampling seed of a call that names none."""
        return derive_seed(self._seed, order)

    def add(self, sending: Sending, calls: list[RecordedCall]) -> None:
        """Record the choices of one finished call, in place of those that an earlier sending of it brought.

        Nothing is recorded of a run that is over, nor of a sending whose client has meanwhile sent the call again.
        """
        with self._lock:
            if self._closed or not sending.counts:
                return
            sending.place.answered = True
            if sending.time > 1:
                earlier = sum(call.order == sending.order for call in self._calls[: self._extracted])
                self._calls = [call for call in self._calls if call.order != sending.order]
                self._extracted -= earlier
            self._calls.extend(calls)

    def calls(self) -> list[RecordedCall]:
        """All recorded choices, in the order their calls were sent."""
        return sorted(self._calls, key=lambda call: (call.order, call.choice))

    def extract(self, clear: bool = True) -> list[RecordedCall]:
        """The choices recorded since the last extraction that cleared, in the order they came in."""
        start, end = self._extracted, len(self._calls)
        if clear:
            self._extracted = end
        return self._calls[start:end]

    def give_step_reward(self, value: float, policy: str | None = None) -> None:
        """Add to the reward of the last call of a policy; raises UserCodeError before its first, or for no number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserCodeError(f"give_step_reward was given {value!r}: expected a finite number")
        step = next((call.order for call in reversed(self._calls) if call.policy == policy), None)
        if step is None:
            by = "" if policy is None else f" of policy {policy!r}"
            raise UserCodeError(f"give_step_reward: this run has made no model call yet{by} that could be rewarded")
        for call in self._calls:
            if call.order == step:
                call.step_reward = (call.step_reward or 0.0) + float(value)

    def close(self) -> None:
        """End the run: a straggler it left behind can neither call the model nor add to the record."""
        with self._lock:
            self._closed = True
