"""The recorded model calls of one run. Each run has its own ``RunHistory``, so runs share no state.

The names and seeds of a run depend only on its position in its batch, so a repeated run replaces the first.
"""

import hashlib
import math
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import count

from rft_platform.common.errors import EngineError, UserCodeError
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.file_names import round_key
from rft_platform.experience.record import ModelCall
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.branches import Branches, Mark
from rft_platform.rollout.recording.policy_routes import PolicyRoute


def group_id(round: int, batch: int, task: int) -> str:
    """Id of the group of runs of the ``task``-th task of an explore batch."""
    return f"{round_key(round)}-b{batch:04d}-t{task:05d}"


def run_id(round: int, batch: int, task: int, repeat: int) -> str:
    """Id of the ``repeat``-th run of a group; all attempts at the run share it."""
    return f"{group_id(round, batch, task)}-{repeat:03d}"


def repeat_of(run_id: str) -> int:
    """Number of a run within its group."""
    return int(run_id.rpartition("-")[2])


def record_key(round: int, batch: int, task: int, repeat: int) -> str:
    """Name of the same run for an agent outside this process, ``<batch>/<task>/<run>``."""
    return f"{round_key(round)}-b{batch:04d}/t{task:05d}/{repeat:03d}"


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2**31) that depends on every part."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class RunEndedError(EngineError):
    """A model call was made after its run had ended."""


@dataclass(slots=True, eq=False)
class CallSlot:
    """A call's position in its run. If a client sends the request of a call again, the call keeps its position."""

    order: int
    times: int = 1  # how often the call was sent
    under_way: bool = True  # True until the last send, the one that counts, has ended
    answered: bool = False  # True if its answer is recorded
    refused: bool = False  # True if the engine or the recorder refused it


@dataclass(frozen=True, slots=True)
class Sending:
    """The ``time``-th send of a call."""

    slot: CallSlot
    time: int

    @property
    def order(self) -> int:
        """Position of the call in its run, by the time of its first send."""
        return self.slot.order

    @property
    def counts(self) -> bool:
        """Whether this is the latest send of the call."""
        return self.time == self.slot.times


class CallSlots:
    """All call positions of a run. Not thread-safe: the owner holds a lock."""

    def __init__(self) -> None:
        self._order = count()
        self._by_request: dict[Hashable, list[CallSlot]] = {}

    def take(self, request_key: Hashable, sent_before: int, is_idempotency_key: bool) -> Sending:
        """Return the slot of the call that ``request_key`` identifies; its client has sent it ``sent_before`` times.

        ``is_idempotency_key``: the client chose the key for the call, so equal keys always mean the same call.
        """
        slots = self._by_request.setdefault(request_key, [])
        slot = slots[-1] if is_idempotency_key and slots else _retried_slot(slots, sent_before) if sent_before else None
        if slot is None:
            slot = CallSlot(next(self._order))
            slots.append(slot)
        else:
            slot.times += 1
            slot.under_way, slot.refused = True, False
        return Sending(slot, slot.times)

    @property
    def unfinished(self) -> int:
        """Number of calls without an answer or a refusal."""
        slots = (slot for slots in self._by_request.values() for slot in slots)
        return sum(not (slot.answered or slot.refused) for slot in slots)


def _retried_slot(slots: list[CallSlot], sent_before: int) -> CallSlot | None:
    """Find the call that a client retries: the last of the equal calls that ended without an answer.

    A client also retries if an answer was recorded but did not reach it. So an answered call is the retried one if
    there is no other equal call. A call in progress is never the retried one: its client still waits for the answer.
    """
    ended = [slot for slot in slots if not slot.under_way and slot.times <= sent_before]
    unanswered = [slot for slot in ended if not slot.answered]
    if unanswered:
        return unanswered[-1]
    return ended[0] if ended and len(slots) == 1 else None


class RunHistory:
    """Records one run's calls of the policy. The recorder fills it from any thread; read it after the run has ended."""

    def __init__(
        self,
        model: str,
        sampling: SamplingParams,
        seed: int,
        key: str = "",
        policies: Mapping[str, PolicyRoute] | None = None,
        shown_model: str | None = None,
    ) -> None:
        """``model``: the policy's name at the engine; ``sampling`` and ``seed`` apply to calls that set none.

        ``key`` names the run, as ``<batch>/<task>/<run>``, for agents outside this process. ``policies`` maps the
        names of further trainable policies, which calls give as their ``model``, to the routes to their engines.
        ``shown_model`` is the model's name in answers; None: the engine's name.
        """
        self.model = model
        self.shown_model = shown_model
        self.policies = dict(policies or {})
        self.key = key
        self.sampling = sampling
        self.client_retries = 0
        self.connection_lost = False  # the engine could not be reached at least once
        self.context_exceeded = False  # the engine refused the last call: prompt longer than the context
        self._seed = seed
        self._calls: list[ModelCall] = []
        self._extracted = 0
        self._closed = False
        self._slots = CallSlots()
        self._branches = Branches()
        self._marks: dict[int, Mark | None] = {}  # of the recorded calls, by their position
        self._states: list[tuple[Mark | None, str | None]] = []
        self._lock = threading.Lock()

    def begin_call(
        self, request_key: Hashable = None, sent_before: int = 0, is_idempotency_key: bool = False
    ) -> Sending:
        """Register a call before it is sent. Raises RunEndedError if the run has ended.

        ``request_key`` identifies the call. The call is a retry if its client has sent it before (``sent_before``
        times), or gave it the ``Idempotency-Key`` of an earlier call. A retry keeps the position and seed of the
        earlier call, and its answer replaces the lost one. ``end_call`` must follow.
        """
        with self._lock:
            if self._closed:
                raise RunEndedError("this run has ended: model calls after its workflow returned are refused")
            self.context_exceeded = False  # set by an earlier call; the workflow continued
            return self._slots.take(request_key, sent_before, is_idempotency_key)

    def refuse_call(self, sending: Sending, too_long: bool = False) -> None:
        """Mark the call as refused; ``too_long``: the engine refused because the conversation exceeds the context."""
        with self._lock:
            if sending.counts:
                sending.slot.refused = True
                self.context_exceeded = self.context_exceeded or too_long

    def end_call(self, sending: Sending) -> None:
        """Mark this send as ended."""
        with self._lock:
            if sending.counts:
                sending.slot.under_way = False

    @property
    def unfinished_calls(self) -> int:
        """Number of calls without a recorded answer or refusal: cancelled by the agent, or still in progress."""
        with self._lock:
            return self._slots.unfinished

    def call_seed(self, order: int) -> int:
        """Sampling seed of a call that sets none."""
        return derive_seed(self._seed, order)

    def add(self, sending: Sending, calls: list[ModelCall]) -> None:
        """Record the choices of one finished call; they replace those of an earlier send of the call.

        Nothing is recorded if the run has ended, or if the client has meanwhile sent the call again.
        """
        with self._lock:
            if self._closed or not sending.counts:
                return
            sending.slot.answered = True
            if sending.time > 1:
                earlier = sum(call.order == sending.order for call in self._calls[: self._extracted])
                self._calls = [call for call in self._calls if call.order != sending.order]
                self._extracted -= earlier
            self._calls.extend(calls)
            self._marks[sending.order] = self._branches.mark()

    def calls(self) -> list[ModelCall]:
        """Return all recorded choices, in the order in which their calls were sent."""
        return sorted(self._calls, key=lambda call: (call.order, call.choice))

    def extract(self, clear: bool = True) -> list[ModelCall]:
        """Return the choices recorded since the last extraction with ``clear``, in the order of recording."""
        start, end = self._extracted, len(self._calls)
        if clear:
            self._extracted = end
        return self._calls[start:end]

    def start(self) -> None:
        """Call this in the context in which the workflow is about to run: its parallel branches are distinguished."""
        self._branches.start()

    def set_env_state(self, digest: str | None) -> None:
        """Set the digest of the environment state that the next calls of this branch of the run respond to."""
        with self._lock:
            self._states.append((self._branches.mark(), digest))

    @property
    def env_state_hash(self) -> str | None:
        """Digest of the environment state that this branch of the run set last."""
        return self._branches.latest(self._states)

    def give_step_reward(self, value: float, policy: str = DEFAULT_POLICY) -> None:
        """Add to the step reward of a policy's last call in this branch of the run.

        Raises UserCodeError without a call or a finite ``value``.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserCodeError(f"give_step_reward was given {value!r}: expected a finite number")
        of_policy = [(self._marks[call.order], call.order) for call in self._calls if call.policy == policy]
        step = self._branches.latest(of_policy)
        if step is None:
            by = "" if policy == DEFAULT_POLICY else f" of policy {policy!r}"
            raise UserCodeError(f"give_step_reward: this run has made no model call{by} yet")
        for call in self._calls:
            if call.order == step:
                call.step_reward = (call.step_reward or 0.0) + float(value)

    def close(self) -> None:
        """End the run. Code of the run that is still running can then neither call the model nor add to the record."""
        with self._lock:
            self._closed = True
