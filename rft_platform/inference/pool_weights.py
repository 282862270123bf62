"""The weights that a pool's replicas have in common, and how one replica is brought to them."""

import threading
from collections.abc import Sequence
from pathlib import Path

from rft_platform.errors import EngineError, WeightMismatchError
from rft_platform.inference.canary import TOLERANCE, mean_difference
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import EngineStatus

#: What a returning replica is compared on.
_QUESTION = [{"role": "user", "content": "The quick brown fox jumps over 13 lazy dogs. What is 6 * 7?"}]


class PoolWeights:
    """Remembers what a replica that comes back must serve, how that answers, and the full weights below an adapter."""

    def __init__(self) -> None:
        self.changing = threading.RLock()  # held while weights change, and while a replica is brought up
        self._full: Path | None = None  # the last full weights that all replicas took
        self._served: EngineStatus | None = None  # what all replicas served when they were last asked
        self._scored: tuple[list[list[int]], list[list[float]]] | None = None  # a probe, and what ``_served`` gives it

    def learn(self, status: EngineStatus, client: EngineClient) -> None:
        """All replicas serve what ``status`` says; ``client`` is one of them. Does nothing while weights change."""
        if not self.changing.acquire(blocking=False):
            return
        try:
            if _identity(self._served) != _identity(status):
                self._served, self._scored = status, None
            if self._scored is None:
                self._scored = _probe(client)
        except EngineError:  # weights that give no finite number, or an engine that has just died
            self._scored = None
        finally:
            self.changing.release()

    def change(self, client: EngineClient, folder: Path, policy_version: int) -> None:
        """Let one replica take new weights."""
        self._served = self._scored = None
        client.update_weights(folder, policy_version)

    def settled(self, folder: Path) -> None:
        """All replicas have taken ``folder``."""
        if not _is_adapter(folder):
            self._full = folder

    def restore(self, client: EngineClient, wanted: EngineStatus) -> None:
        """Make one replica serve what ``wanted`` says; raises WeightMismatchError where it does not come to that."""
        folder = Path(wanted.weights_path)
        if _is_adapter(folder) and self._full is not None:
            client.update_weights(self._full, wanted.policy_version)
        client.update_weights(folder, wanted.policy_version)
        served = client.status()
        if served.weights_digest != wanted.weights_digest:
            raise WeightMismatchError(
                f"the weights in {folder} have changed: their digest is {served.weights_digest[:12]}, and that of "
                f"policy version {wanted.policy_version} was {wanted.weights_digest[:12]}"
            )

    def bring_up(self, client: EngineClient, serving: Sequence[EngineClient]) -> None:
        """Give a process the weights that those ``serving`` have, or had when one last was, and compare the answers.

        Raises WeightMismatchError where they differ (the process is left paused), EngineError where nothing is known
        to compare with: then whoever connects and deploys next decides.
        """
        if not serving and (self._served is None or self._scored is None):
            raise EngineError(f"the engine at {client.url} runs, but nothing is known that it could be compared with")
        wanted, scored = self._served, self._scored
        if serving:
            wanted = serving[0].status()
            if _identity(wanted) != _identity(self._served) or scored is None:
                scored = _probe(serving[0])
        assert wanted is not None and scored is not None
        client.pause("wait")  # an attempt that is cut short leaves it paused, which is seen, and checked, by ``deploy``
        if _identity(client.status()) != _identity(wanted):
            self.restore(client, wanted)
        difference = mean_difference(client.score(scored[0]), scored[1])
        tolerance = TOLERANCE[wanted.dtype]
        if not difference <= tolerance:
            raise WeightMismatchError(
                f"the engine at {client.url} came back with policy version {wanted.policy_version}, but its log-probs "
                f"differ from those of its pool by {difference:.3g} nats on average (at most {tolerance:g})"
            )
        client.resume()


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def _identity(status: EngineStatus | None) -> tuple[int, str] | None:
    return None if status is None else (status.policy_version, status.weights_digest)


def _probe(client: EngineClient) -> tuple[list[list[int]], list[list[float]]]:
    sequences = client.render([_QUESTION])
    return sequences, client.score(sequences)
