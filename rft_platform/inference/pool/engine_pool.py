"""Several engine processes that serve the same weights, used as one ``PolicyEngine``.

Invariants:

- All active replicas serve the same weights, except during ``roll``, which changes one after another. Otherwise they
  change together; if one refuses the weights, all keep or restore the previous ones.
- A result does not depend on the number of replicas or on how a batch is split: draws depend on seed, prompt and
  choice.
- A replica that does not answer is marked down, and its share of the batch is repeated on another one. A call fails
  only if no replica is left.
- A restarted replica serves again only after it has loaded the current weights and was checked.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rft_platform.common.errors import EngineError, RftError, WeightMismatchError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import EngineStatus, Generation, PartialBatch, PauseMode, SamplingParams
from rft_platform.inference.pool.batch_dispatch import BatchDispatcher
from rft_platform.inference.pool.broadcast import Broadcaster
from rft_platform.inference.pool.replicas import Replica, Replicas
from rft_platform.inference.pool.weights import PoolWeights

RETRY_S = 30.0  # between two attempts at the same replica
LOG = logging.getLogger(__name__)


class ReplicaRestarter:
    """Restarts replicas, each in its own thread: when a replica goes down, and again at later calls to the pool."""

    def __init__(
        self,
        start: Callable[[int], EngineClient],
        admit: Callable[[int, EngineClient], None],
        set_down_reason: Callable[[int, str], None],
    ) -> None:
        """``start`` finds or starts a replica's process. ``admit`` gives the process the pool's weights and makes it
        active, or raises. ``set_down_reason`` receives the reason why a replica could not be restarted."""
        self._start, self._admit, self._set_down_reason = start, admit, set_down_reason
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._failed_at: dict[int, float] = {}
        self._closed = self._end = False

    def restart(self, number: int) -> None:
        """Try to restart a replica, unless an attempt is running or failed in the last 30 s, or the pool is closed."""
        with self._lock:
            recently = time.monotonic() - self._failed_at.get(number, float("-inf")) < RETRY_S
            if self._closed or recently or number in self._threads:
                return
            thread = threading.Thread(target=self._run, args=(number,), name=f"restart-replica-{number}", daemon=True)
            self._threads[number] = thread
            thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the running attempts."""
        deadline = time.monotonic() + timeout_s
        for thread in list(self._threads.values()):
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self, end: bool = False) -> None:
        """Start no further attempts; with ``end``, a process that is being started is ended as soon as it is up."""
        with self._lock:
            self._closed, self._end = True, end

    def _run(self, number: int) -> None:
        try:
            client = self._start(number)
            if self._end:
                client.shutdown()
            if self._closed:
                return
            self._admit(number, client)
            LOG.warning("replica %d of the engine serves again at %s", number, client.url)
        except Exception as error:  # any error: the other replicas keep serving, and ``none_left`` names this reason
            self._set_down_reason(number, f"it could not be restarted: {error}")
            self._failed_at[number] = time.monotonic()
            LOG.warning("replica %d of the engine could not be restarted: %s", number, error)
        finally:
            with self._lock:
                self._threads.pop(number, None)


T = TypeVar("T")
SAME_VERSION_ATTEMPTS = 5
SHUTDOWN_WAIT_S = 60.0
#: URL, process id and start: the first process of every container has the id 1, also after a restart.
_Process: TypeAlias = tuple[str, int, float]


def _process(url: str, status: EngineStatus) -> _Process:
    return url, status.pid, status.started_at


class EnginePool:
    """``PolicyEngine`` over several ``EngineClient``; safe to share between threads."""

    def __init__(
        self,
        clients: Mapping[int, EngineClient],
        start: Callable[[int], EngineClient],
        down: Mapping[int, str] | None = None,
    ) -> None:
        """``clients``: by replica number; ``start(number)`` finds or starts a replica's process; ``down``: the reason
        why a replica without a client is down, by number."""
        members = [Replica(number, client) for number, client in clients.items()]
        self.replicas = Replicas(members, dict(down or {}))
        self._broadcaster = Broadcaster(self.replicas)
        self._dispatcher = BatchDispatcher(self.replicas, self._broadcaster.is_gone, self._abort)
        self._weights = PoolWeights()
        self._paused: PauseMode | None = None
        self._membership = threading.Lock()  # guards the pause state while a replica joins
        self._seen: dict[_Process, dict[str, float]] = {}  # last known counters of each process, also of ended ones
        self._restarter = ReplicaRestarter(start, self._admit, self.replicas.set_down_reason)
        self.replicas.on_down = self._restarter.restart
        self.replicas.on_idle = self._broadcaster.probe

    @property
    def base_url(self) -> str:
        """Root of the OpenAI-compatible API of the first active replica, ending in ``/v1``.

        For external callers. Their requests go to this one replica: the pool neither distributes nor repeats them.
        """
        serving = self.replicas.serving()
        if not serving:
            raise self.replicas.none_left()
        return serving[0].client.base_url

    @property
    def api_key(self) -> str:
        """The key of the replica at ``base_url``; each replica has its own."""
        serving = self.replicas.serving()
        if not serving:
            raise self.replicas.none_left()
        return serving[0].client.api_key

    # --- reading

    def status(self) -> EngineStatus:
        """The replicas' common state. ``cpu_seconds``: sum over all processes, with the last value of ended ones.

        If the replicas serve different weights, ``weights_digest`` lists their digests. This text equals no real
        digest, so ``deploy`` then updates all replicas. ``paused`` is true if any replica is paused. No replica wakes.
        """
        self._restart_lost()
        answers = self._broadcaster.answers(lambda client: (client.url, client.status()))
        for url, status in answers:
            self._count(_process(url, status), {"cpu_seconds": status.cpu_seconds})
        statuses = [status for _, status in answers]
        served = dict.fromkeys((status.policy_version, status.weights_digest) for status in statuses)
        digest = statuses[0].weights_digest
        if len(served) == 1:
            self._weights.learn(statuses[0])
        else:
            digest = "replicas differ: " + ", ".join(f"{version}={digest[:12]}" for version, digest in served)
        return replace(
            statuses[0],
            weights_digest=digest,
            paused=any(status.paused for status in statuses),
            cpu_seconds=self._sums()["cpu_seconds"],
            capabilities=[each for each in statuses[0].capabilities if all(each in s.capabilities for s in statuses)],
        )

    def metrics(self) -> dict[str, float]:
        """Sums of the replicas' counters. What a process counted after it was last read and before it died is lost."""

        def read(client: EngineClient) -> tuple[_Process, dict[str, float]]:
            return _process(client.url, client.status()), client.metrics()

        for process, counters in self._broadcaster.answers(read):
            self._count(process, counters)
        sums = self._sums()
        sums.pop("cpu_seconds", None)
        return sums

    # --- batches

    def render(
        self, conversations: Sequence[list[dict[str, Any]]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        """Apply the chat template: prompt ids of each conversation, with the generation prompt."""
        ones = [1] * len(conversations)
        return self._dispatcher.dispatch(conversations, ones, 1, lambda client, part, _: client.render(part, tools))

    def decode(self, sequences: Sequence[list[int]]) -> list[str]:
        """Text of each sequence, without special tokens."""
        return self._dispatcher.dispatch(
            sequences, [1] * len(sequences), 1, lambda client, part, _: client.decode(part)
        )

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1; the first token's is 0.0."""
        return self._dispatcher.dispatch(
            sequences, [*map(len, sequences)], 1, lambda client, part, _: client.score(part)
        )

    def score_everywhere(self, sequences: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """Call ``score`` on every active replica; returns the log-probs by the replica's URL."""
        return dict(self._broadcaster.answers(lambda client: (client.url, client.score(sequences))))

    def generate(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, partial: PartialBatch | None = None
    ) -> list[Generation]:
        """Sample ``sampling.n`` completions of every prompt, all with one version of the weights.

        With a seed the completions equal those of a single engine, however the prompts are split.
        """
        self._restart_lost()
        self.know_weights()
        generations = self._generate(prompts, sampling, 0, partial)
        for _ in range(SAME_VERSION_ATTEMPTS):
            if len({generation.policy_version for generation in generations}) < 2:
                return generations
            with self._weights.changing:  # wait for the concurrent update, then repeat the prompts of the old version
                version = self.status().policy_version
            marks = [generation.policy_version != version for generation in generations]
            edges = [0, *(i for i, (a, b) in enumerate(pairwise(marks), 1) if a != b), len(marks)]
            for start, stop in pairwise(edges):
                if marks[start]:
                    early = partial and partial.part(start, stop)
                    generations[start:stop] = self._generate(prompts[start:stop], sampling, start, early)
        raise EngineError(
            f"the weights changed during each of {SAME_VERSION_ATTEMPTS} attempts to sample a batch on one version"
        )

    def know_weights(self) -> None:
        """Score a probe unless its log-probs are known: they are the reference if all replicas are lost later.

        This wakes a replica that sleeps, so call it only if the replicas work now.
        """
        if self._weights.scored:
            return
        with suppress(EngineError):  # no replica answers: the next call reports it
            self.status()
            for replica in self.replicas.serving()[:1]:
                self._weights.score(replica.client)

    # --- control

    def fetch_weights(self, folder: Path) -> None:
        """Let the machines of the replicas that do not see the home fetch the weights in ``folder``; they serve on."""
        self._broadcaster.answers(lambda client: client.fetch_weights(folder))

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Swap the weights of all replicas or of none: if one refuses, the others get their previous weights back.

        Raises the refusing replica's error. A replica that does not answer is marked down and takes the new weights
        when it returns.
        """
        with self._weights.changing:
            before = self._broadcaster.outcomes(lambda client: client.status())
            outcomes = self._broadcaster.outcomes(lambda client: self._weights.change(client, folder, policy_version))
            refusals = [outcome for outcome in outcomes.values() if isinstance(outcome, RftError)]
            if not refusals:
                self._weights.settled(folder)
                self.know_weights()
                return
            for replica, outcome in outcomes.items():
                if not isinstance(outcome, RftError):
                    self._restore_previous(replica, before.get(replica))
            raise refusals[0]

    def roll(self, change: Callable[[EngineClient], T], least_serving: int) -> list[T]:
        """Change the weights of one replica after another, while at least ``least_serving`` others take requests.

        ``change`` loads and checks the new weights on one replica, and restores the previous weights if this fails.
        After an error the replicas that were already changed get their previous weights back, one after another; then
        the error is raised. A replica that is down takes the new weights when it returns.
        """
        changed: list[tuple[Replica, EngineStatus]] = []
        results = []
        with self._weights.changing:
            self._weights.forget()
            for replica in self.replicas.serving():
                try:
                    before = replica.client.status()
                    with self.replicas.out_of_service(replica, least_serving):
                        results.append(change(replica.client))
                    changed.append((replica, before))
                except RftError as error:
                    if self._broadcaster.is_gone(replica, error):
                        continue
                    if replica.client.status().paused:  # it could not restore its weights
                        self.replicas.mark_down(replica, str(error))
                    for other, previous in changed:
                        self._roll_back(other, previous, least_serving)
                    raise
            if not changed:
                raise self.replicas.none_left()
            self._weights.settled(Path(changed[0][0].client.status().weights_path))
            self.know_weights()
        return results

    def pause(self, mode: PauseMode = "wait") -> None:
        """Hold new requests; ``abort`` ends running requests, ``wait`` lets them finish, ``keep`` freezes them."""
        with self._membership:
            before, self._paused = self._paused, mode
        try:
            self._broadcaster.answers(lambda client: client.pause(mode))
        except RftError:
            with self._membership:
                self._paused = before
            if before is None:  # the other replicas have paused
                with suppress(RftError):
                    self._broadcaster.outcomes(lambda client: client.resume())
            raise

    def resume(self) -> None:
        """Serve again after a pause."""
        with self._membership:
            self._paused = None
        self._broadcaster.answers(lambda client: client.resume())

    def sleep(self) -> None:
        """Free the GPU memory of all replicas until their next requests."""
        self._broadcaster.answers(lambda client: client.sleep())

    def shutdown(self) -> None:
        """End all processes and remove their leases; processes that somebody else runs go on."""
        self._restarter.close(end=True)
        self._restarter.wait(SHUTDOWN_WAIT_S)
        if self.replicas.serving():
            self._broadcaster.outcomes(lambda client: client.shutdown())

    def close(self) -> None:
        """Close the connections; the replicas keep running. From now on this pool restarts no replica."""
        self._restarter.close()
        for replica in self.replicas.serving():
            replica.client.close()

    def __enter__(self) -> "EnginePool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- parts

    def _generate(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, offset: int, partial: PartialBatch | None
    ) -> list[Generation]:
        costs = [len(prompt) + sampling.n * sampling.max_tokens for prompt in prompts]
        first = sampling.first_prompt + offset

        def call(client: EngineClient, part: Sequence[list[int]], start: int) -> list[Generation]:
            early = partial and partial.part(start, start + len(part))
            return client.generate(part, replace(sampling, first_prompt=first + start), early)

        return self._dispatcher.dispatch(prompts, costs, sampling.n, call)

    def _abort(self, replica: Replica) -> None:
        """End the running requests of ``replica``."""
        replica.client.pause("abort")
        if self._paused is None:
            replica.client.resume()

    # --- restarting replicas

    def _restart_lost(self) -> None:
        for number in self.replicas.down():
            self._restarter.restart(number)

    def _admit(self, number: int, client: EngineClient) -> None:
        """Give the process behind ``client`` the pool's weights and pause state, and make it active."""
        with self._weights.changing:
            try:
                self._weights.bring_up(client, [replica.client for replica in self.replicas.serving()])
            except WeightMismatchError:
                # Otherwise a caller could find this process by its lease and use it without a check. A process that
                # somebody else runs stays paused, so that ``deploy`` repeats the check.
                client.shutdown()
                raise
            with self._membership:
                if self._paused is not None:
                    client.pause(self._paused)
                self.replicas.join(Replica(number, client))

    def _restore_previous(
        self,
        replica: Replica,
        before: EngineStatus | RftError | None,
        aside: AbstractContextManager[None] | None = None,
    ) -> None:
        """Restore a replica's previous weights; if that fails, mark it down until it is restarted.

        ``aside`` takes the replica out of service while its weights change. If too few other replicas are active for
        that, the replica keeps serving.
        """
        failure: RftError | None = None
        with ExitStack() as stack:
            with suppress(EngineError):
                stack.enter_context(aside or nullcontext())
            try:
                if not isinstance(before, EngineStatus):
                    raise EngineError(f"the version that it served is unknown: {before}")
                self._weights.restore(replica.client, before)
            except RftError as error:
                failure = error
        if failure is not None:  # after the block, because only an active replica can be marked down
            self.replicas.mark_down(replica, f"it could not restore its previous weights: {failure}")

    def _roll_back(self, replica: Replica, before: EngineStatus, least_serving: int) -> None:
        """Restore a replica's previous weights after a rolling update that failed at another replica."""
        self._restore_previous(replica, before, self.replicas.out_of_service(replica, least_serving))

    # --- counters

    def _count(self, process: _Process, counters: dict[str, float]) -> None:
        self._seen[process] = {**self._seen.get(process, {}), **counters}

    def _sums(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for counters in list(self._seen.values()):
            for name, value in counters.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums
