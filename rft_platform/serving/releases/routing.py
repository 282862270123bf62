"""Choose the engine that answers a production request: the serving one, or that of a running release's candidate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rft_platform.common.errors import EngineError
from rft_platform.inference.interface import EngineStatus
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.serving.releases.assignment import BASE, CANDIDATE, Arm, Split, unit_of

ARM_HEADER = "x-rft-arm"  #: by this header a request chooses its arm while a release runs: ``candidate`` or ``base``


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine that serves the policy, and how its calls are recorded."""

    status: EngineStatus
    clients: RecordingClients
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

    def route(self, headers: Mapping[str, str], place: Mapping[str, str], request_id: str) -> Route:
        """The route of a request. Results of a request that chose its arm count in a canary, not in an A/B test."""
        release = self.release
        if release is None:
            return Route(self.serving())
        arm = release.split.arm(unit_of(place, release.split.sticky, request_id))
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
