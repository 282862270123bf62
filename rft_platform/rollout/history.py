"""The model calls of one run, kept apart from every other run's by being an object of its own."""

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rft_platform.errors import EngineError
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.identity import derive_seed


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


class RunHistory:
    """What one run asked of the policy. Filled by the recording transport, read when the run has ended."""

    def __init__(self, model: str, sampling: SamplingParams, seed: int) -> None:
        """``model`` is the policy's name at the engine; ``sampling`` and ``seed`` hold where a call names none."""
        self.model = model
        self.sampling = sampling
        self.client_retries = 0
        self.env_state_hash: str | None = None  # of the environment's state now, as the workflow told it last
        self.connection_lost = False  # the engine could not be reached at least once
        self._seed = seed
        self._order = count()
        self._calls: list[RecordedCall] = []
        self._extracted = 0
        self._closed = False

    def begin_call(self) -> int:
        """Place of a call that is about to be sent. Refused once the run is over."""
        if self._closed:
            raise EngineError("this run has ended: a model call made after its workflow returned is not served")
        return next(self._order)

    def call_seed(self, order: int) -> int:
        """Sampling seed of a call that names none."""
        return derive_seed(self._seed, order)

    def add(self, calls: list[RecordedCall]) -> None:
        """Record the choices of one finished call."""
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

    def close(self) -> None:
        """End the run: a straggler it left behind can neither call the model nor add to the record."""
        self._closed = True
