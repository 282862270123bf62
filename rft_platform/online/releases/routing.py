"""Choose the engine that answers a production request: the serving one, or that of a running release's candidate.

A hash of the request's unit chooses, so that a user or a conversation keeps its version.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rft_platform.common.errors import EngineError
from rft_platform.inference.interface import EngineStatus

if TYPE_CHECKING:
    from rft_platform.rollout.recording.clients import RecordingClients

Arm = Literal["base", "candidate"]
Sticky = Literal["user", "conversation", "request"]

BASE: Arm = "base"
CANDIDATE: Arm = "candidate"
_DRAWS = 1 << 64
#: For each configured unit, the names that identify a request's unit; the first one that the request has counts.
_UNITS: dict[Sticky, tuple[str, ...]] = {
    "user": ("subject", "conversation", "run"),
    "conversation": ("conversation", "run"),
    "request": (),
}
ARM_HEADER = "x-rft-arm"  #: by this header a request chooses its arm while a release runs: ``candidate`` or ``base``


@dataclass(frozen=True, slots=True)
class Split:
    """How a release splits the traffic: the fraction ``share`` of the units gets the candidate.

    ``seed`` is different for each release, so that each release selects other units.
    """

    share: float
    sticky: Sticky
    seed: int

    def arm(self, unit: str) -> Arm:
        """The arm of a unit, always the same one."""
        digest = hashlib.sha256(f"{self.seed}/{unit}".encode()).digest()
        return CANDIDATE if int.from_bytes(digest[:8]) / _DRAWS < self.share else BASE


def unit_of(names: Mapping[str, str | None], sticky: Sticky, request_id: str) -> str:
    """The unit of a request, from the ``subject``, ``conversation``, ``task_id`` and ``run_id`` that it names.

    If the request names no unit of the kind ``sticky``, the next smaller kind is used; the smallest unit is the single
    request.
    """
    task, run = names.get("task_id"), names.get("run_id")
    named = {**names, "run": f"{task}/{run}" if task is not None and run is not None else None}
    found = next((f"{name}:{named[name]}" for name in _UNITS[sticky] if named.get(name)), None)
    return found or f"request:{request_id}"


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine that serves the policy, and how its calls are recorded."""

    status: EngineStatus
    clients: "RecordingClients"
    base_url: str


@dataclass(frozen=True, slots=True)
class ServedRelease:
    """A running release, and the engine that serves its candidate."""

    number: int
    kind: Literal["canary", "ab"]
    split: Split
    candidate: ServedEngine


@dataclass(frozen=True, slots=True)
class Route:
    """The engine of one request, and the variant to store with its calls."""

    engine: ServedEngine
    variant: str | None = None
    arm: Arm = BASE


class Router:
    """Routes requests. Another thread may set ``base`` and ``release`` at any time.

    ``base`` is None until an engine runs.
    """

    def __init__(self, base: ServedEngine | None) -> None:
        self.base = base
        self.release: ServedRelease | None = None
        self.candidate_failures = 0  # of the newest release: requests that the base answered after the candidate failed
        self._newest: int | None = None

    def serving(self) -> ServedEngine:
        """The engine of the serving version. Raises EngineError until it runs."""
        if self.base is None:
            raise EngineError("the engine does not run yet, the status page says why: send the request again later")
        return self.base

    def route(self, headers: Mapping[str, str], names: Mapping[str, str], request_id: str) -> Route:
        """The route of a request. Results of a request that chose its arm count in a canary, not in an A/B test."""
        release = self.release
        if release is None:
            return Route(self.serving())
        arm = release.split.arm(unit_of(names, release.split.sticky, request_id))
        chosen = headers.get(ARM_HEADER)
        if chosen in (BASE, CANDIDATE):
            arm = CANDIDATE if chosen == CANDIDATE else BASE
        counts = chosen is None or release.kind == "canary"
        engine = release.candidate if arm == CANDIDATE else self.serving()
        return Route(engine, f"{release.number}/{arm}" if counts else None, arm)

    def begin(self, release: ServedRelease) -> None:
        """Begin to route a release; the failures of a new release count from 0."""
        if self._newest != release.number:
            self._newest, self.candidate_failures = release.number, 0
        self.release = release
