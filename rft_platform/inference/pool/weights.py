"""Track the common weights of a pool's replicas, and load them into a replica that returns."""

import threading
from collections.abc import Sequence
from pathlib import Path

from rft_platform.common.errors import EngineError, WeightMismatchError
from rft_platform.inference.canary import TOLERANCE, mean_difference
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import EngineStatus
from rft_platform.inference.serving.weight_files import is_adapter

#: Conversation on which a returning replica is compared with the pool.
_QUESTION = [{"role": "user", "content": "The quick brown fox jumps over 13 lazy dogs. What is 6 * 7?"}]


class PoolWeights:
    """Remembers the pool's weights, their log-probs on a probe, and the full weights below a LoRA adapter."""

    def __init__(self) -> None:
        self.changing = threading.RLock()  # held while weights change and while a restarted replica gets its weights
        self._full: Path | None = None  # folder of the last full weights that all replicas loaded
        self._served: EngineStatus | None = None  # last known common state of all replicas
        self._scored: tuple[list[list[int]], list[list[float]]] | None = None  # probe ids and their log-probs

    def learn(self, status: EngineStatus) -> None:
        """Remember ``status`` as the state of all replicas. Does nothing while weights change."""
        if not self.changing.acquire(blocking=False):
            return
        try:
            if _identity(self._served) != _identity(status):
                self._served, self._scored = status, None
        finally:
            self.changing.release()

    @property
    def scored(self) -> bool:
        """Whether the log-probs of the common weights are known."""
        return self._scored is not None

    def score(self, client: EngineClient) -> None:
        """Score the probe on one of the replicas, ``client``, if the common weights are known. This wakes an engine.

        Does nothing while weights change.
        """
        if not self.changing.acquire(blocking=False):
            return
        try:
            if self._served is not None and self._scored is None:
                self._scored = _probe(client)
        except EngineError:  # the weights give log-probs that are not finite, or the engine has just died
            self._scored = None
        finally:
            self.changing.release()

    def change(self, client: EngineClient, folder: Path, policy_version: int) -> None:
        """Load new weights into one replica."""
        self.forget()
        client.update_weights(folder, policy_version)

    def forget(self) -> None:
        """Forget the common weights; call it before they change."""
        self._served = self._scored = None

    def settled(self, folder: Path) -> None:
        """Record that all replicas serve the weights in ``folder``."""
        if not is_adapter(folder):
            self._full = folder

    def restore(self, client: EngineClient, target: EngineStatus) -> None:
        """Load the weights of ``target`` into one replica; WeightMismatchError if the digest of the files changed."""
        folder = Path(target.weights_path)
        if is_adapter(folder) and self._full is not None:
            client.update_weights(self._full, target.policy_version)
        client.update_weights(folder, target.policy_version)
        served = client.status()
        if served.weights_digest != target.weights_digest:
            raise WeightMismatchError(
                f"the weights in {folder} have changed: their digest is {served.weights_digest[:12]}, but that of "
                f"policy version {target.policy_version} was {target.weights_digest[:12]}"
            )

    def bring_up(self, client: EngineClient, serving: Sequence[EngineClient]) -> None:
        """Load the weights of the ``serving`` replicas (or the last known ones) and compare log-probs on the probe.

        Raises WeightMismatchError if the log-probs differ; the process then stays paused. Raises EngineError if the
        pool's weights are unknown; the next ``deploy`` then sets and checks the weights.
        """
        if not serving and (self._served is None or self._scored is None):
            raise EngineError(
                f"the engine at {client.url} is running, but there is no reference to compare its weights with"
            )
        target, scored = self._served, self._scored
        if serving:
            target = serving[0].status()
            if _identity(target) != _identity(self._served) or scored is None:
                scored = _probe(serving[0])
        assert target is not None and scored is not None
        client.pause("wait")  # an interrupted attempt leaves the process paused, so ``deploy`` repeats the check
        if _identity(client.status()) != _identity(target):
            self.restore(client, target)
        difference = mean_difference(client.score(scored[0]), scored[1])
        tolerance = TOLERANCE[target.dtype]
        if not difference <= tolerance:
            raise WeightMismatchError(
                f"the engine at {client.url} restarted with policy version {target.policy_version}, but its log-probs "
                f"differ from those of its pool by {difference:.3g} nats on average (at most {tolerance:g})"
            )
        client.resume()


def _identity(status: EngineStatus | None) -> tuple[int, str] | None:
    return None if status is None else (status.policy_version, status.weights_digest)


def _probe(client: EngineClient) -> tuple[list[list[int]], list[list[float]]]:
    sequences = client.render([_QUESTION])
    return sequences, client.score(sequences)
