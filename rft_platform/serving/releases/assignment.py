"""Choose the arm of a release by a hash of the request's unit, so that a user or a conversation keeps its version."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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


def unit_of(place: Mapping[str, str | None], sticky: Sticky, request_id: str) -> str:
    """The unit of a request, from the ``subject``, ``conversation``, ``task_id`` and ``run_id`` that it names.

    If the request names no unit of the kind ``sticky``, the next smaller kind is used; the smallest unit is the single
    request.
    """
    task, run = place.get("task_id"), place.get("run_id")
    named = {**place, "run": f"{task}/{run}" if task is not None and run is not None else None}
    found = next((f"{name}:{named[name]}" for name in _UNITS[sticky] if named.get(name)), None)
    return found or f"request:{request_id}"
