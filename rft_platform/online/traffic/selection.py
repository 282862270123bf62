"""Select the production calls that are recorded for training: by rate, by an explicit mark, or by user code.

A strategy decides after a call was answered. Several strategies are asked in the order of their priority, the
highest first; the first strategy that accepts the call decides.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from rft_platform.common.errors import UserError

MARK_HEADER = "x-rft-mark"  #: any value marks the call; the value itself is not stored
MARK_KEY = "rft_mark"  #: the same in a request body's ``metadata``
_DRAWS = 1 << 64


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """Facts about a call beyond its request and answer. All calls of one ``unit`` are sampled together."""

    unit: str  # ``unit_of`` the call
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    tenant: str = ""
    now: float = 0.0  # seconds since the epoch


def unit_of(tenant: str, names: Mapping[str, str], msg_id: str) -> str:
    """The calls that are selected together: a run of a task, else a conversation, else a run, else the message.

    Run ids are often small numbers that start again with each task, so a run is named by its task; a run without a
    task, outside of a conversation, is named by its id alone. Each tenant has its own names.
    """
    task, conversation, run = (names.get(name) for name in ("task_id", "conversation", "run_id"))
    named = ("run", task, run) if task and run else ("conversation", conversation) if conversation else ("run", run)
    parts = (tenant, *named) if named[-1] else (tenant, "message", msg_id)
    return "/".join(quote(str(part), safe="") for part in parts)  # a slash inside a name separates nothing


@dataclass(frozen=True, slots=True)
class SelectionDecision:
    """Whether a call is recorded, and why."""

    accept: bool
    reason: str = ""


class SelectionStrategy(Protocol):
    """Decides on one answered call."""

    @property
    def priority(self) -> int:
        """The priority; strategies with a larger number are asked first."""
        ...

    def should_select(
        self, request: Mapping[str, Any], response: Mapping[str, Any], context: SelectionContext
    ) -> SelectionDecision:
        """Decide on a call by the request's body, the answer's body and its context."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingRateStrategy:
    """Accepts a share of all runs. All calls of a run or conversation share one decision."""

    rate: float = 0.1
    priority: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise UserError(f"sampling rate {self.rate!r}: expected a number from 0 to 1")

    @classmethod
    def of(cls, rate: float) -> "SamplingRateStrategy":
        """The strategy with the sampling rate ``rate``, from 0 to 1."""
        return cls(rate)

    def should_select(
        self, request: Mapping[str, Any], response: Mapping[str, Any], context: SelectionContext
    ) -> SelectionDecision:
        """Accept the call if the hash of its unit falls into the share."""
        draw = int.from_bytes(hashlib.sha256(f"{self.seed}/{context.unit}".encode()).digest()[:8]) / _DRAWS
        return SelectionDecision(draw < self.rate, f"sampled at rate {self.rate:g}")


class ExplicitMarkingStrategy:
    """Accepts calls that a header or their metadata marks, and later calls of the same unit for ``ttl_s`` seconds."""

    def __init__(self, ttl_s: float = 60.0, priority: int = 100) -> None:
        self.priority = priority
        self._ttl_s = ttl_s
        self._marked: dict[str, float] = {}  # time of the mark by unit

    def should_select(
        self, request: Mapping[str, Any], response: Mapping[str, Any], context: SelectionContext
    ) -> SelectionDecision:
        """Accept a marked call, and calls of a unit that was marked recently."""
        self._marked = {unit: at for unit, at in self._marked.items() if context.now - at < self._ttl_s}
        metadata = request.get("metadata")
        if context.headers.get(MARK_HEADER) or (isinstance(metadata, Mapping) and metadata.get(MARK_KEY)):
            self._marked[context.unit] = context.now
        is_marked = context.unit in self._marked
        return SelectionDecision(is_marked, "marked" if is_marked else "not marked")


class Selection:
    """Asks several strategies in the order of their priority."""

    def __init__(self, strategies: Sequence[SelectionStrategy]) -> None:
        """Without any strategy every call is accepted."""
        self._strategies = sorted(strategies, key=lambda strategy: -strategy.priority)

    def decide(
        self,
        request: Mapping[str, Any],
        response: Mapping[str, Any],
        unit: str,
        headers: Mapping[str, str],
        tenant: str,
    ) -> SelectionDecision:
        """The decision of the first strategy that accepts the call, else that of the last one."""
        decision = SelectionDecision(not self._strategies, "every call is recorded")
        context = SelectionContext(unit, headers, tenant, time.time())
        for strategy in self._strategies:
            decision = strategy.should_select(request, response, context)
            if decision.accept:
                break
        return decision
