"""Deploy the chosen versions to the engines of the online service, and decide on running releases.

A release is a canary or an A/B test. A thread reads the database twice a second, so the engine follows a decision made
by CLI, HTTP or another host at once.
"""

import logging
import threading
import time
from collections.abc import Callable

from rft_platform.cluster.local.supervisor import EngineStarts
from rft_platform.common.errors import (
    DamagedError,
    EngineError,
    StorageError,
    UserError,
    WeightMismatchError,
    WeightsAbsentError,
)
from rft_platform.inference.interface import PolicyEngine
from rft_platform.inference.pool.engine_pool import EnginePool
from rft_platform.online.releases.commands import decide, reject
from rft_platform.online.releases.routing import Router, ServedEngine, ServedRelease
from rft_platform.online.releases.rules import canary_rule
from rft_platform.online.releases.store import Release, ReleaseStore
from rft_platform.online.releases.versions import policy_of_version
from rft_platform.online.traffic.database import FIRST_IMPORTED
from rft_platform.rollout.recording.clients import RecordingClients
from rft_platform.rounds.project.policy import deploy
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy
from rft_platform.rounds.releases.released import released_policy, withdrawn_versions
from rft_platform.rounds.setup.connections import connect_engine
from rft_platform.rounds.setup.side_engines import connect_candidate_engine, shares_engine

LOG = logging.getLogger(__name__)

_STEP_S = 0.5
_LONGEST_STEP_S = 4.0  # longest pause after failures; not shorter, because each attempt to deploy delays requests
_STATUS_S = 5.0  # seconds between status requests to an engine whose version should not have changed
_DECIDE_S = 2.0


class ReleaseController:
    """Deploys the version that should serve, and routes the traffic of the running release."""

    def __init__(
        self,
        project: Project,
        store: ReleaseStore,
        connect_base: Callable[[Project], PolicyEngine] = connect_engine,
        connect_candidate: Callable[[Project], PolicyEngine] = connect_candidate_engine,
    ) -> None:
        self._project = project
        self._store = store
        service = project.config.service
        self._least_serving = service.least_in_service if service.weight_update == "rolling" else None
        self._connect_base, self._connect_candidate = connect_base, connect_candidate
        self._deploying = threading.Lock()  # the gateway calls ``find_engine`` in another thread when an engine is lost
        self.engine_starts = EngineStarts[PolicyEngine]()
        self._base: PolicyEngine | None = None
        self._candidate: PolicyEngine | None = None
        self._deployed: tuple[int, float] | None = None  # version of the base, and time of its last status request
        self._decided_at = 0.0

    def find_engine(self) -> ServedEngine:
        """Find or start the serving engine, and deploy the version that should serve."""
        return self._deploy_base(self._store.running(), find=True)

    def run(self, router: Router, stop: threading.Event) -> None:
        """Repeat ``step`` until ``stop`` is set."""
        wait = _STEP_S
        while not stop.wait(wait):
            try:
                self.step(router)
                wait = _STEP_S
            except Exception as error:
                self._base = None
                wait = min(2 * wait, _LONGEST_STEP_S)
                LOG.warning("a release decision cannot be carried out and will be retried: %s", error)

    def step(self, router: Router) -> None:
        """Deploy and route once as the newest decisions say."""
        running = self._store.running()
        deployed = self._deployed  # another thread may change it
        if deployed is None or self._is_due(running, *deployed):
            router.base = self._deploy_base(running)
        if running is None:
            router.release = None
            self._start_canary()
            return
        if router.release is None or router.release.number != running.number:
            candidate = self._deploy_candidate(running)
            if candidate is None:
                return
            router.begin(ServedRelease(running.number, running.kind, running.split, candidate))
        if time.monotonic() - self._decided_at >= _DECIDE_S:
            self._decided_at = time.monotonic()
            self._keep_candidate(router)
            status = decide(self._store, running, router.candidate_failures)
            if status != "running":
                LOG.info("%s %d of version %d: %s", running.kind, running.number, running.candidate_version, status)

    def _is_due(self, running: Release | None, version: int, looked_at: float) -> bool:
        """Whether the engine must change, or its last status request is older than ``_STATUS_S``."""
        policy = self._policy(running)
        return time.monotonic() - looked_at > _STATUS_S or (policy is not None and policy.policy_version != version)

    def _policy(self, running: Release | None) -> Policy | None:
        """The policy that should serve; None before a version is published: then the base model serves."""
        version = self._store.served() if running is None else running.base_version
        if version is None:
            return released_policy(self._project)
        policy = policy_of_version(self._project, version)
        if policy is None:
            raise StorageError(f"policy version {version} was chosen to serve, and no round has published it")
        return policy

    def _deploy_base(self, running: Release | None, *, find: bool = False) -> ServedEngine:
        with self._deploying:
            if find:
                self._base = self._deployed = None
            engine = self._base or self.engine_starts.attempt(lambda: self._connect_base(self._project))
            self._base, policy = engine, self._policy(running)
            if policy is not None and not self._is_newer_on_purpose(engine, policy):
                deploy(engine, policy, self._least_serving)
            status = engine.status()
            version = status.policy_version if policy is None else policy.policy_version
            self._deployed = (version, time.monotonic())
            return self._served(engine)

    def _is_newer_on_purpose(self, engine: PolicyEngine, policy: Policy) -> bool:
        """Whether an evaluation loaded a newer version into the shared engine, and no promotion or rollback chose one.

        Imported versions are ignored, because evaluations never load them.
        """
        shared = self._store.served() is None and shares_engine(self._project)
        return shared and policy.policy_version < engine.status().policy_version <= FIRST_IMPORTED

    def _deploy_candidate(self, running: Release) -> ServedEngine | None:
        """The engine of the candidate; None if the candidate cannot be served, which ends the release."""
        policy = policy_of_version(self._project, running.candidate_version)
        try:
            if policy is None:
                raise StorageError(f"no round has published version {running.candidate_version}")
            self._candidate = self._connect_candidate(self._project)
            deploy(self._candidate, policy)
        except (UserError, StorageError, DamagedError, WeightMismatchError, WeightsAbsentError) as error:
            reject(self._store, running, f"the candidate cannot be served: {error}")
            return None
        return self._served(self._candidate)

    def _keep_candidate(self, router: Router) -> None:
        """Keep the candidate's engine from reaching its idle time-out; the next step restarts a lost engine."""
        try:
            if self._candidate is not None:
                self._candidate.status()
        except EngineError as error:
            LOG.warning("the candidate's engine was lost and is started again: %s", error)
            router.release = None

    def _served(self, engine: PolicyEngine) -> ServedEngine:
        replicas = engine.replicas if isinstance(engine, EnginePool) else None
        timeout = self._project.config.explorer.max_timeout
        clients = RecordingClients(engine.base_url, timeout, replicas, engine.api_key)
        return ServedEngine(engine.status(), clients, engine.base_url)

    def _start_canary(self) -> None:
        """If ``service.canary_share`` is set, start a canary of a released version newer than the served one.

        A version that a decision withdrew gets none. Nor does a version that was trained from it, unless refused
        versions are trained further (``evaluation.after_refusal: continue``): then all later versions descend from it.
        """
        share = self._project.config.service.canary_share
        newest = released_policy(self._project) if share else None
        if newest is None:
            return
        serving = self._store.served()
        if serving is None:
            self._store.serve(newest.policy_version, "promoted", "the first version of a service with canaries")
            return
        version = newest.policy_version
        if version > serving and not self._store.was_candidate(version) and not self._is_withdrawn(version):
            reason = f"version {version} was released by round {newest.round}"
            self._store.start("canary", serving, version, share, "conversation", canary_rule(), reason)

    def _is_withdrawn(self, version: int) -> bool:
        """Whether a decision withdrew the version, or one that it was trained from and that has to start again."""
        if self._store.verdicts().get(version) is not None:
            return True
        return self._project.config.restarts_after_refusal and version in withdrawn_versions(self._project)
