"""Several engine processes that serve the same weights, used as one ``PolicyEngine``.

Batches are split over the replicas by load. A replica that does not answer is left out, its share is repeated on
another (seeded draws do not depend on who makes them), and it is started again while the others go on. Only where none
is left does a call fail. The replicas change weights together or not at all.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from rft_platform.errors import EngineError, RftError, WeightMismatchError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.everyone import Everyone
from rft_platform.inference.interface import EngineStatus, Generation, PauseMode, SamplingParams
from rft_platform.inference.mending import Mender
from rft_platform.inference.pool_weights import PoolWeights
from rft_platform.inference.replicas import Replica, Replicas
from rft_platform.inference.spreading import Spreader

T = TypeVar("T")
SAME_VERSION_ATTEMPTS = 5
SHUTDOWN_WAIT_S = 60.0


class EnginePool:
    """``PolicyEngine`` over several ``EngineClient``; safe to share between threads."""

    def __init__(
        self,
        clients: Mapping[int, EngineClient],
        start: Callable[[int], EngineClient],
        down: Mapping[int, str] | None = None,
    ) -> None:
        """``clients`` by replica number; ``start`` finds or starts one of them; ``down``: why others do not serve."""
        members = [Replica(number, client) for number, client in clients.items()]
        self.replicas = Replicas(members, dict(down or {}))
        self._everyone = Everyone(self.replicas)
        self._spreader = Spreader(self.replicas, self._everyone.is_gone, self._abort)
        self._weights = PoolWeights()
        self._paused: PauseMode | None = None
        self._membership = threading.Lock()  # pausing, and joining what is paused
        self._seen: dict[str, dict[str, float]] = {}  # counters of each process, gone ones too, when it was last asked
        self._mender = Mender(start, self._admit, self.replicas.note)
        self.replicas.on_down = self._mender.mend
        self.replicas.on_quiet = self._everyone.look_at

    @property
    def base_url(self) -> str:
        """Root of the OpenAI-compatible API of the first replica that serves, ending in ``/v1``.

        It is for callers outside: one address cannot be several, so their requests are not spread and not repeated.
        """
        serving = self.replicas.serving()
        if not serving:
            raise self.replicas.none_left()
        return serving[0].client.base_url

    @property
    def api_key(self) -> str:
        """The key of the replica that ``base_url`` names; each replica has its own."""
        serving = self.replicas.serving()
        if not serving:
            raise self.replicas.none_left()
        return serving[0].client.api_key

    # --- reading

    def status(self) -> EngineStatus:
        """What all replicas have in common; ``cpu_seconds`` is their sum, gone ones as they were last seen.

        Where they disagree on the weights, the digest says so and equals none: whoever compares it (``deploy``) then
        brings all of them up. ``paused`` tells that one is.
        """
        self._mend()
        statuses = self._everyone.answers(lambda client: client.status())
        for status in statuses:
            self._count(str(status.pid), {"cpu_seconds": status.cpu_seconds})
        served = dict.fromkeys((status.policy_version, status.weights_digest) for status in statuses)
        digest = statuses[0].weights_digest
        if len(served) == 1:
            self._learn(statuses[0])
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
        """Sums of the replicas' counters; what a process that died counted after it was last asked is lost."""

        def read(client: EngineClient) -> tuple[str, dict[str, float]]:
            return str(client.status().pid), client.metrics()

        for pid, counters in self._everyone.answers(read):
            self._count(pid, counters)
        sums = self._sums()
        sums.pop("cpu_seconds", None)
        return sums

    # --- batches

    def render(
        self, conversations: Sequence[list[dict[str, Any]]], tools: list[dict[str, Any]] | None = None
    ) -> list[list[int]]:
        """Prompt ids of each conversation through the chat template, with the generation prompt."""
        ones = [1] * len(conversations)
        return self._spreader.spread(conversations, ones, 1, lambda client, part, _: client.render(part, tools))

    def decode(self, sequences: Sequence[list[int]]) -> list[str]:
        """Text of each sequence, special tokens left out."""
        return self._spreader.spread(sequences, [1] * len(sequences), 1, lambda client, part, _: client.decode(part))

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob of each token given those before it, at temperature 1; the first token's is 0.0."""
        return self._spreader.spread(sequences, [*map(len, sequences)], 1, lambda client, part, _: client.score(part))

    def score_everywhere(self, sequences: Sequence[list[int]]) -> dict[str, list[list[float]]]:
        """As ``score``, by every replica that serves: each one's log-probs under its URL."""
        return dict(self._everyone.answers(lambda client: (client.url, client.score(sequences))))

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[Generation]:
        """Sample ``sampling.n`` completions of every prompt; all of them by one version of the weights.

        With a seed the answers are those of one engine, however the prompts were split.
        """
        self._mend()
        generations = self._generate(prompts, sampling, 0)
        for _ in range(SAME_VERSION_ATTEMPTS):
            if len({generation.policy_version for generation in generations}) < 2:
                return generations
            with self._weights.changing:  # once the update that came in between is over, repeat what it left behind
                version = self.status().policy_version
            marks = [generation.policy_version != version for generation in generations]
            edges = [0, *(i for i, (a, b) in enumerate(pairwise(marks), 1) if a != b), len(marks)]
            for start, stop in pairwise(edges):
                if marks[start]:
                    generations[start:stop] = self._generate(prompts[start:stop], sampling, start)
        raise EngineError(
            f"the weights changed during each of {SAME_VERSION_ATTEMPTS} attempts to sample a batch on one version"
        )

    # --- control

    def update_weights(self, folder: Path, policy_version: int) -> None:
        """Swap the weights of all replicas, or of none: where one refuses, those of the others are put back.

        Raises what the refusing replica said. One that does not answer is left out, and takes the new weights when it
        is back.
        """
        with self._weights.changing:
            before = self._everyone.outcomes(lambda client: client.status())
            outcomes = self._everyone.outcomes(lambda client: self._weights.change(client, folder, policy_version))
            refusals = [outcome for outcome in outcomes.values() if isinstance(outcome, RftError)]
            if not refusals:
                self._weights.settled(folder)
                self.status()
                return
            for replica, outcome in outcomes.items():
                if not isinstance(outcome, RftError):
                    self._put_back(replica, before.get(replica))
            raise refusals[0]

    def pause(self, mode: PauseMode = "wait") -> None:
        """Hold new requests; ``abort`` ends those running, ``wait`` lets them finish, ``keep`` freezes them."""
        with self._membership:
            before, self._paused = self._paused, mode
        try:
            self._everyone.answers(lambda client: client.pause(mode))
        except RftError:
            self._paused = before
            raise

    def resume(self) -> None:
        """Serve again after a pause."""
        with self._membership:
            self._paused = None
        self._everyone.answers(lambda client: client.resume())

    def shutdown(self) -> None:
        """End all processes and remove their leases."""
        self._mender.close(end=True)
        self._mender.wait(SHUTDOWN_WAIT_S)
        if self.replicas.serving():
            self._everyone.outcomes(lambda client: client.shutdown())

    def close(self) -> None:
        """Close the connections; the replicas go on. None is started again from here any more."""
        self._mender.close()
        for replica in self.replicas.serving():
            replica.client.close()

    def __enter__(self) -> "EnginePool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- parts

    def _generate(self, prompts: Sequence[list[int]], sampling: SamplingParams, offset: int) -> list[Generation]:
        costs = [len(prompt) + sampling.n * sampling.max_tokens for prompt in prompts]
        first = sampling.first_prompt + offset

        def call(client: EngineClient, part: Sequence[list[int]], start: int) -> list[Generation]:
            return client.generate(part, replace(sampling, first_prompt=first + start))

        return self._spreader.spread(prompts, costs, sampling.n, call)

    def _abort(self, replica: Replica) -> None:
        """End what ``replica`` works on."""
        replica.client.pause("abort")
        if self._paused is None:
            replica.client.resume()

    # --- bringing replicas back

    def _mend(self) -> None:
        for number in self.replicas.down():
            self._mender.mend(number)

    def _admit(self, number: int, client: EngineClient) -> None:
        """Bring the process behind ``client`` to the pool's weights and its pause, and let it serve."""
        with self._weights.changing:
            try:
                self._weights.bring_up(client, [replica.client for replica in self.replicas.serving()])
            except WeightMismatchError:
                client.shutdown()  # nobody must find it and take it for one that was checked
                raise
            with self._membership:
                if self._paused is not None:
                    client.pause(self._paused)
                self.replicas.join(Replica(number, client))

    def _put_back(self, replica: Replica, before: EngineStatus | RftError | None) -> None:
        """Give a replica the weights it had; one that does not take them is left out until it is brought up again."""
        try:
            if not isinstance(before, EngineStatus):
                raise EngineError(f"what it served is not known: {before}")
            self._weights.restore(replica.client, before)
        except RftError as error:
            self.replicas.mark_down(replica, f"it could not go back to the weights it had: {error}")

    def _learn(self, status: EngineStatus) -> None:
        for replica in self.replicas.serving()[:1]:
            self._weights.learn(status, replica.client)

    # --- counters

    def _count(self, process: str, counters: dict[str, float]) -> None:
        self._seen[process] = {**self._seen.get(process, {}), **counters}

    def _sums(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for counters in list(self._seen.values()):
            for name, value in counters.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums
