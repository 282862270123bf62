"""A server process's lease, token and idle time-out."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rft_platform.common.processes.lease import Lease, remove_lease, write_lease

LOG = logging.getLogger(__name__)
HOST = "127.0.0.1"
#: Paths that do not reset the idle time-out: monitoring must not keep an unused engine alive.
UNCOUNTED_PATHS = ("/health", "/ping", "/metrics", "/v1/models", "/engine/metrics")
EXIT_USER_ERROR = 2  # exit code of a server with wrong settings; the last line of its log gives the reason


@dataclass
class ServerLifecycle:
    """The lease of one server process, and the time of its last use."""

    kind: str  # kind in the lease
    lease: Path
    model_digest: str
    idle_timeout_s: float
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    last_use: float = field(default_factory=time.monotonic)

    def publish(self, port: int) -> None:
        """Write the lease. Callers find the server by its lease."""
        created = psutil.Process().create_time()
        self.touch()
        lease = Lease(
            self.kind, os.getpid(), created, HOST, port, self.token, self.model_digest, time.time(), details={}
        )
        write_lease(self.lease, lease)

    def withdraw(self) -> None:
        """Remove the lease, unless a newer server process has replaced it."""
        remove_lease(self.lease, os.getpid())

    def touch(self) -> None:
        """Reset the idle time."""
        self.last_use = time.monotonic()

    async def stop_when_idle(self, busy: Callable[[], bool], stop: Callable[[], None]) -> None:
        """Call ``stop`` once the engine is not ``busy`` and was not used for ``idle_timeout_s``."""
        remaining = self.idle_timeout_s
        while remaining > 0:
            await asyncio.sleep(remaining)
            if busy():
                self.touch()
            remaining = self.idle_timeout_s - (time.monotonic() - self.last_use)
        LOG.info("no request for %g s: the engine stops", self.idle_timeout_s)
        stop()
