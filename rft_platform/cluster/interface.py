"""The declaration of a long-lived service, the address of a running one, and what runs services.

A ``Cluster`` places, names, watches and replaces processes. Everything else is a matter between a service and its
clients, which talk HTTP with a token. ``LocalCluster`` runs services as processes of this machine.
"""

import os
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from rft_platform.common.errors import RftError, UserError

#: Environment variable with further host names, separated by commas, by which a server may be addressed.
HOSTS_VARIABLE = "RFT_WEB_HOSTS"

LOOPBACK = "127.0.0.1"
GRACE_S = 7.0  # seconds that a service has to end before it is killed


class StartError(RftError):
    """A service ended, or was not ready in time; the message holds the last lines of its log."""

    def __init__(self, message: str, exit_code: int | None = None, last_line: str = "", pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid  # of the process that ended; None: it still runs
        self.exit_code = exit_code  # None: the process still runs, or another process reaped it
        self.last_line = last_line  # of the log: a server with wrong settings ends with the reason


@dataclass(frozen=True, slots=True)
class Bundle:
    """What each process of a service, or a worker, uses on its node."""

    cpus: int = 1  # threads of its arithmetic, and processors that a cluster of several machines reserves; 0: no limit
    devices: str | None = None  # CUDA_VISIBLE_DEVICES; None: the caller's, or those that the cluster has reserved
    gpus: float = 0.0  # GPUs that a cluster of several machines reserves
    resources: Mapping[str, float] = field(default_factory=dict)  # named resources that it reserves

    def times(self, count: int) -> "Bundle":
        """What ``count`` such processes reserve on one node."""
        resources = {name: count * amount for name, amount in self.resources.items()}
        return replace(self, cpus=count * self.cpus, gpus=count * self.gpus, resources=resources)

    def __str__(self) -> str:
        return _amounts(self)


def _amounts(of: "Bundle | Node") -> str:
    named = {"CPU" if of.cpus == 1 else "CPUs": of.cpus, "GPU" if of.gpus == 1 else "GPUs": of.gpus, **of.resources}
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items())


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster of several machines, and what it has."""

    name: str  # its address
    cpus: float
    gpus: float
    resources: Mapping[str, float] = field(default_factory=dict)  # named resources
    has_home: bool = True  # it sees the home of the project

    def holds(self, bundle: Bundle) -> bool:
        """Whether the machine has as much as ``bundle``."""
        named = all(self.resources.get(name, 0.0) >= amount for name, amount in bundle.resources.items())
        return self.cpus >= bundle.cpus and self.gpus >= bundle.gpus and named

    def without(self, bundle: Bundle) -> "Node":
        """What is left of the machine when ``bundle`` is reserved."""
        left = {name: amount - bundle.resources.get(name, 0.0) for name, amount in self.resources.items()}
        return replace(self, cpus=self.cpus - bundle.cpus, gpus=self.gpus - bundle.gpus, resources=left)

    def __str__(self) -> str:
        return f"{self.name}: {_amounts(self)}{'' if self.has_home else ', without the home'}"


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of a service that compute together as ranks: torchrun starts them, if there are several."""

    ranks: int = 1  # on each node
    nodes: int = 1
    endpoint: str = ""  # ``host:port`` on the first node, at which the nodes connect; Ray's cluster chooses it itself
    timeout_s: float = 900.0  # how long a node waits for the others

    @property
    def size(self) -> int:
        """Number of ranks on all nodes."""
        return self.ranks * self.nodes


@dataclass(frozen=True, slots=True)
class Service:
    """A long-lived server. One with the same name and digest is the same service.

    It outlives the command that needs it, unless ``ends_with_starter``. ``cluster.local.supervisor`` keeps services
    running for as long as a command.
    """

    name: str
    module: str  # run as ``python -m``
    arguments: tuple[str, ...] = ()
    digest: str = ""  # of everything that makes it another service: settings, model folder, code
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)  # in addition to the caller's variables
    bundle: Bundle = Bundle(cpus=0)
    group: Group = Group()
    host: str = LOOPBACK  # where it listens; a cluster of several machines replaces loopback by the node's address
    port: int = 0  # 0: any free port, which its address names
    idle_timeout_s: float | None = None  # it ends after so many seconds without a request; None: never
    start_timeout_s: float = 180.0
    answer_s: float = 30.0  # a service whose /health is silent for so long is replaced
    grace_s: float = GRACE_S  # how long it may take to end before it is killed
    shutdown_path: str = ""  # a POST here lets it end after the work that it does; "": SIGTERM does
    stages: Mapping[str, str] = field(default_factory=dict)  # text that it prints while it starts -> what it does then
    is_ready: Callable[[], bool] | None = None  # of a program that publishes no address itself: whether it serves
    ends_with_starter: bool = False  # it ends when the process that started it ends in any way
    reads_home: bool = False  # it reads and writes the home of the project: only nodes that see it can run it
    leaves_work: bool = False  # if it ends by itself, processes that it started (Dagster runs) go on until ``stop``


@dataclass(frozen=True, slots=True)
class Address:
    """Where a running service is reached."""

    name: str
    url: str  # ``http://host:port``
    token: str = field(repr=False)
    generation: int = 1  # how often a service of this name was started
    digest: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)  # kind, pid, started_at, and what the service adds


@dataclass(frozen=True, slots=True)
class Status:
    """A service that was started and not stopped."""

    address: Address
    runs: bool  # False: its process ended by itself, or was killed


class Worker(Protocol):
    """A process that calls functions of one module, one call at a time, as ``cluster.child.Child`` does."""

    @property
    def is_alive(self) -> bool:
        """Whether the process can be called."""
        ...

    async def ask_async(
        self,
        function: str,
        *arguments: Any,
        wall_s: float | None = None,
        on_note: Callable[[Any], None] | None = None,
    ) -> Any:
        """The result of ``function(*arguments)``; see ``Child.ask`` for arguments and errors."""
        ...

    def is_lost_with(self, other: "Worker") -> bool:
        """Whether a call has found ``other`` lost, and this process was started on the same machine."""
        ...

    def kill(self) -> None:
        """Kill the process at once, with all its descendants."""
        ...


@cache
def tls_context() -> ssl.SSLContext:
    """What clients of services pass to httpx as ``verify``: it would read all certificates again for each of them.

    ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` name the certificates of a private authority.
    """
    import httpx  # not at the top: agents in other interpreters load this module, and may lack httpx

    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise UserError(
            f"SSL_CERT_FILE {os.environ.get('SSL_CERT_FILE')!r}: expected a file of certificates (PEM), but it cannot "
            f"be read ({error}); correct or unset it"
        ) from error


class Cluster(Protocol):
    """Runs services. Several processes may call it at once."""

    def nodes(self) -> list[Node]:
        """The machines of a cluster of several machines; empty for this machine."""
        ...

    def ensure(self, service: Service) -> Address:
        """The address of the running service, which is started first if it does not run.

        A service of this name that has another digest, or does not answer, is ended and replaced. Of two callers at
        once one starts the service and both get its address. Announces (``common.progress``) the start and the
        ``stages`` that it reaches. Raises ``StartError`` if the service does not start.
        """
        ...

    def find(self, name: str) -> Address | None:
        """The address of the service ``name``; None if its process does not run."""
        ...

    def running(self, *patterns: str) -> list[Address]:
        """The addresses of the running services; with ``patterns`` (``engine*``), of those with matching names."""
        ...

    def services(self, *patterns: str) -> dict[str, Status]:
        """The services that were started and not stopped, by name; with ``patterns``, those with matching names."""
        ...

    def stop(self, name: str, grace_s: float, *, generation: int | None = None, shutdown_path: str = "") -> bool:
        """End the service with everything that it started; returns whether it ran.

        ``generation``: do nothing if another generation runs. ``shutdown_path``: let it end after the work that it
        does, as long as it sends something at least every ``grace_s`` seconds.
        """
        ...

    def answers(self, address: Address) -> bool:
        """Whether the service answers, and none of its processes is stopped."""
        ...

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines that the service printed, below a line that says where they are."""
        ...

    def processor_seconds(self) -> dict[tuple[str, int], float]:
        """Processor time that each service has used since its start, by name and generation; 0 if it has ended."""
        ...

    def wait_for_starts(self, *patterns: str) -> None:
        """Wait a while until no service with a matching name is being started."""
        ...

    def stop_strays(self) -> list[int]:
        """End processes that were started for a service whose start did not finish; returns their ids."""
        ...

    def stop_all(self) -> None:
        """End all services."""
        ...

    def used(self) -> frozenset[str]:
        """The names of the services that this process has called ``ensure`` for, without those of ``end_use``."""
        ...

    def end_use(self, name: str, starter: str | None) -> None:
        """End this process's use of a service; end the service if a command started it and no process uses it.

        ``starter`` is the name of this command (``leases.naming_starter``); None if it leaves the service running.
        """
        ...

    def worker(
        self,
        module: str,
        *,
        python: str | None = None,
        log: Path,
        bundle: Bundle = Bundle(),
        runtime_env: Mapping[str, Any] | None = None,
    ) -> Worker:
        """Start a process that calls functions of ``module``; this does not wait for it.

        ``python``: another interpreter, which needs only what ``module`` imports. ``log``: the file that its output is
        appended to. ``runtime_env``: a runtime environment of Ray, with Ray's names. Raises OSError if it cannot start.
        """
        ...
