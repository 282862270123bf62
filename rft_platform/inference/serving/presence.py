"""How a server is found and when it ends: its lease, its token, its idle time-out."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rft_platform.processes.lease import Lease, remove_lease, write_lease

LOG = logging.getLogger(__name__)
HOST = "127.0.0.1"
VERSION_HEADER = "X-Policy-Version"
#: Monitoring must not keep an unused engine alive.
UNCOUNTED_PATHS = ("/health", "/ping", "/metrics", "/v1/models", "/engine/metrics")
EXIT_USER_ERROR = 2  # of a server's process whose settings are at fault: the last line of its log says why


@dataclass
class Presence:
    """The lease of one server process, and how long nobody has needed it."""

    kind: str  # as the lease names it
    lease: Path
    model_digest: str
    idle_timeout_s: float
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    last_use: float = field(default_factory=time.monotonic)

    def publish(self, port: int) -> None:
        """Write the lease: from now on callers come."""
        created = psutil.Process().create_time()
        self.touch()
        lease = Lease(
            self.kind, os.getpid(), created, HOST, port, self.token, self.model_digest, time.time(), details={}
        )
        write_lease(self.lease, lease)

    def withdraw(self) -> None:
        """Remove the lease, unless it is a successor's."""
        remove_lease(self.lease, os.getpid())

    def touch(self) -> None:
        """Somebody needs the engine: its idle time starts anew."""
        self.last_use = time.monotonic()

    async def stop_when_idle(self, busy: Callable[[], bool], stop: Callable[[], None]) -> None:
        """Call ``stop`` once nobody has needed the engine for ``idle_timeout_s`` and it is not ``busy``."""
        left = self.idle_timeout_s
        while left > 0:
            await asyncio.sleep(left)
            if busy():
                self.touch()
            left = self.idle_timeout_s - (time.monotonic() - self.last_use)
        LOG.info("no request for %g s: the engine ends", self.idle_timeout_s)
        stop()
