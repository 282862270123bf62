"""The part of a service that runs in its own process: its settings, its address, and when it ends.

Whatever cluster started the process, it finds its lease and its settings in the environment, and publishes its address
by writing the lease.

``python -m rft_platform.cluster.local.service_process run COMMAND ...`` runs a command of another package as a service.
``... ranks COMMAND ...`` does so for a command that starts the ranks of a service, such as torchrun: they have the
lifeline, too. ``... stop PID`` ends process PID with its descendants.
"""

import asyncio
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil

from rft_platform.cluster.confined import end_with_parent
from rft_platform.cluster.interface import GRACE_S, HOSTS_VARIABLE, LOOPBACK, Service
from rft_platform.cluster.local.leases import LEASE_VARIABLE, Lease, lease_environment, remove_lease, write_lease
from rft_platform.cluster.local.processes import stop_process

LOG = logging.getLogger(__name__)
SERVICE_VARIABLE = "RFT_SERVICE"  # environment variable with the settings of the process's service, as JSON
TOKEN_VARIABLE = "RFT_SERVICE_TOKEN"  # environment variable with the token of the service; unset: a random one
#: Environment variable with the path of a named pipe: the process ends as soon as nobody holds the pipe open.
LIFELINE_VARIABLE = "RFT_LIFELINE"
#: Environment variable with the id of the process that this process ends with.
STARTER_PID_VARIABLE = "RFT_STARTER_PID"
_WATCH_S = 0.5
EXIT_USER_ERROR = 2  # exit code of a service with wrong settings; the last line of its log gives the reason


def service_environment(service: Service, lease: Path, generation: int) -> dict[str, str]:
    """Environment variables to set for the process of ``service`` that is to write ``lease``."""
    threads = str(service.bundle.cpus)
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS") if service.bundle.cpus else ()
    names = ("digest", "host", "port", "idle_timeout_s")
    settings = {name: getattr(service, name) for name in names} | {"generation": generation}
    devices = {} if service.bundle.devices is None else {"CUDA_VISIBLE_DEVICES": service.bundle.devices}
    hosts = {} if service.host == LOOPBACK else {HOSTS_VARIABLE: service.host}
    return {
        **dict.fromkeys(limits, threads),
        **devices,
        **hosts,
        **service.env,
        **lease_environment(lease),
        **({STARTER_PID_VARIABLE: str(os.getpid())} if service.ends_with_starter else {}),
        SERVICE_VARIABLE: json.dumps(settings),
    }


def end_with_starter() -> None:
    """End this process when its starter ends, if its service says so. A service calls it before anything else.

    If the lifeline is cut, the kernel kills the process and its group. If a command was killed, another process ends
    this one with its descendants, in the way in which the command would have done it.
    """
    if (lifeline := os.environ.pop(LIFELINE_VARIABLE, None)) is not None:
        end_with_parent(os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK))
    if (starter := os.environ.pop(STARTER_PID_VARIABLE, None)) is not None:  # its own processes have another starter
        threading.Thread(target=_watch, args=(int(starter),), name="starter", daemon=True).start()


def _watch(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(_WATCH_S)
    command = [sys.executable, "-P", "-m", __spec__.name, "stop", str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def of_command(command: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Module and arguments of a service that is a command of another package."""
    return __spec__.name, ("run", *command)


def of_ranks(command: Sequence[str]) -> list[str]:
    """Module and arguments of a command of another package that starts the ranks of a service."""
    return [__spec__.name, "ranks", *command]


@dataclass
class ServiceProcess:
    """The settings of this process's service, and the time of its last use."""

    kind: str  # kind in the lease
    lease: Path
    digest: str = ""
    host: str = "127.0.0.1"  # where to listen
    port: int = 0
    idle_timeout_s: float | None = None
    generation: int = 1
    token: str = field(default_factory=lambda: os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32), repr=False)
    last_use: float = field(default_factory=time.monotonic)
    requests: int = 0  # that run now, and reset the idle time

    @classmethod
    def from_environment(cls, kind: str) -> "ServiceProcess":
        """What the cluster that started this process has stored."""
        end_with_starter()
        return cls(kind, Path(os.environ[LEASE_VARIABLE]), **json.loads(os.environ[SERVICE_VARIABLE]))

    def publish(self, port: int, **details: Any) -> None:
        """Write the lease, by which callers find the service: it must answer ``GET /health`` from now on."""
        self.touch()
        lease = Lease(
            self.kind, os.getpid(), psutil.Process().create_time(), self.host, port, self.token, self.digest,
            time.time(), details, self.generation,
        )  # fmt: skip
        write_lease(self.lease, lease)

    def withdraw(self) -> None:
        """Remove the lease, unless a newer process has replaced it."""
        remove_lease(self.lease, os.getpid())

    def touch(self) -> None:
        """Reset the idle time."""
        self.last_use = time.monotonic()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The service is not idle during the block, and its idle time begins at the end."""
        self.touch()
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self.touch()

    async def stop_when_idle(self, busy: Callable[[], bool], stop: Callable[[], None]) -> None:
        """Call ``stop`` once the service is not ``busy`` and was not used for ``idle_timeout_s``."""
        if self.idle_timeout_s is None:
            return
        remaining = self.idle_timeout_s
        while remaining > 0:
            await asyncio.sleep(remaining)
            if self.requests or busy():
                self.touch()
            remaining = self.idle_timeout_s - (time.monotonic() - self.last_use)
        LOG.info("no request for %g s: the service stops", self.idle_timeout_s)
        stop()


if __name__ == "__main__":
    _, action, *arguments = sys.argv
    if action == "stop":
        stop_process(psutil.Process(int(arguments[0])), GRACE_S)
    else:
        cut = {LIFELINE_VARIABLE: os.environ[LIFELINE_VARIABLE]} if LIFELINE_VARIABLE in os.environ else {}
        end_with_starter()
        if action == "ranks":  # they have process groups of their own, which the end of this one does not reach
            os.environ.update(cut)
        sys.argv = arguments
        (script,) = entry_points(group="console_scripts", name=arguments[0])
        sys.exit(script.load()())
