"""Restart a lost replica and return it to its pool while the other replicas keep serving."""

import logging
import threading
import time
from collections.abc import Callable

from rft_platform.inference.client import EngineClient

RETRY_S = 30.0  # between two attempts at the same replica
LOGGER = logging.getLogger(__name__)


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
            LOGGER.warning("replica %d of the engine serves again at %s", number, client.url)
        except Exception as error:  # any error: the other replicas keep serving, and ``none_left`` names this reason
            self._set_down_reason(number, f"it could not be restarted: {error}")
            self._failed_at[number] = time.monotonic()
            LOGGER.warning("replica %d of the engine could not be restarted: %s", number, error)
        finally:
            with self._lock:
                self._threads.pop(number, None)
