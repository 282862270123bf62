"""Services as processes of this machine: found by their lease files, or started."""

import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import httpx
import psutil

from rft_platform.cluster.child import Child
from rft_platform.cluster.interface import Address, Bundle, Node, Service, StartError, Status, tls_context
from rft_platform.cluster.local.file_cluster import END_S, FileCluster, StartProgress, check_interrupted, tail
from rft_platform.cluster.local.leases import (
    Lease,
    end_strays,
    holder,
    leases_started_below,
    read_lease,
    remove_lease,
    root_of,
    stop_holder,
    write_lease,
)
from rft_platform.cluster.local.locks import locked
from rft_platform.cluster.local.processes import (
    CREATE_TIME_TOLERANCE_S,
    POLL_S,
    exit_code,
    is_stopped,
    run_in_foreground,
    runs,
    start_detached,
    stop_process,
    wait_until_ended,
)
from rft_platform.cluster.local.service_process import of_ranks, service_environment
from rft_platform.common.errors import RftError
from rft_platform.common.files import last_lines

STOPPED_S = 20.0  # a process that is stopped for so long while it starts is replaced
_HEALTH_S = 10.0  # time-out of one request to /health


class LocalCluster(FileCluster):
    """A ``Cluster`` of this machine. A service is found by its lease, a file in the folder ``leases``."""

    def nodes(self) -> list[Node]:
        """No nodes: services and children share this machine."""
        return []

    def find(self, name: str) -> Address | None:
        """The address of the service ``name``; None if its process does not run."""
        lease = read_lease(self.lease_file(name))
        return lease.address(name) if lease is not None and lease.alive else None

    def answers(self, address: Address) -> bool:
        """Whether the service answers, and none of its processes is stopped."""
        lease = read_lease(self.lease_file(address.name))
        return lease is not None and lease.generation == address.generation and _answers(lease)

    def leases(self, *patterns: str) -> dict[str, Lease]:
        """The leases by name, whether their processes run or not; with ``patterns``, those of matching names only."""
        files = sorted({file for each in patterns or ("*",) for file in self.folder.glob(f"{each}.json")})
        return {file.stem: lease for file in files if (lease := read_lease(file)) is not None}

    def services(self, *patterns: str) -> dict[str, Status]:
        """The services that have a lease, by name; with ``patterns``, those with matching names."""
        return {name: Status(lease.address(name), lease.alive) for name, lease in self.leases(*patterns).items()}

    def processor_seconds(self) -> dict[tuple[str, int], float]:
        """Processor time that the services with a lease have used since their start, by name and generation."""
        return {(name, lease.generation): processor_seconds(lease) for name, lease in self.leases().items()}

    def stop_strays(self, grace_s: float = END_S) -> list[int]:
        """End processes that were started for a lease but do not hold one; returns their ids."""
        return [pid for path in leases_started_below(self.folder) for pid in end_strays(path, grace_s)]

    def stop_all(self) -> None:
        """End all services, and processes without a lease."""
        for name in self.leases():
            self.stop(name, END_S)
        self.stop_strays()

    def worker(
        self,
        module: str,
        *,
        python: str | None = None,
        log: Path,
        bundle: Bundle = Bundle(),
        runtime_env: Mapping[str, Any] | None = None,
    ) -> Child:
        """Start a child process.

        ``bundle`` has no effect, because all children of this machine share it; nor has ``runtime_env``, because only
        Ray builds it, and a configuration with both is refused.
        """
        return Child(module, python=python, log=log)

    def become(self, service: Service) -> NoReturn:
        """Replace this process by the service, which then prints to this terminal and gets this process's signals."""
        command = command_of(service)
        with locked(self.lease_file(service.name)):
            env = self._environment(service, self._next_generation(service.name))
        os.execvpe(command[0], command, env)

    def _environment(self, service: Service, generation: int) -> dict[str, str]:
        paths = {"PYTHONPATH": path_of_package(self.logs)} if service.python != sys.executable else {}
        return {**os.environ, **paths, **service_environment(service, self.lease_file(service.name), generation)}

    def start(self, service: Service, generation: int) -> Address:
        """Start a service that does not run; the caller holds the start lock, or is the only one."""
        path, log = self.lease_file(service.name), self.log_file(service.name)
        if not service.leaves_work:
            end_strays(path, service.grace_s)  # of a starter that was killed before the lease was written
        progress = StartProgress(service, log)
        process = start_detached(command_of(service), log, self._environment(service, generation))

        def look() -> None:
            progress.update()
            if service.is_ready is not None and service.is_ready():
                write_lease(path, _lease_of(service, generation, process))

        try:
            lease = wait_for_lease(
                path, process, service.start_timeout_s, log, look, 10 * POLL_S if service.is_ready else POLL_S
            )
        except (RftError, OSError):
            stop_process(process, service.grace_s)
            raise
        return lease.address(service.name)

    def _end(
        self, name: str, grace_s: float, shutdown_path: str = "", generation: int | None = None, alone: bool = False
    ) -> bool:
        path = self.lease_file(name)
        lease = read_lease(path)
        if lease is None or generation not in (None, lease.generation):
            return False
        return _end_processes(path, lease, grace_s, shutdown_path, alone, others=generation is None)

    def _end_strays(self, name: str, grace_s: float, starter: str | None = None) -> None:
        end_strays(self.lease_file(name), grace_s, starter)

    def _started_by(self, name: str) -> str | None:
        lease = read_lease(self.lease_file(name))
        return None if lease is None else lease.started_by


def processor_seconds(lease: Lease) -> float:
    """Processor time that a service's processes have used since their start."""
    root = root_of(lease)
    return 0.0 if root is None else sum(map(_processor_seconds_of, [root, *root.children(recursive=True)]))


def command_of(service: Service, node_rank: int = 0) -> list[str]:
    """The command line of a service; of one of its nodes, if it has several.

    A single rank needs no torchrun, which adds 1.8 s and a second process. torchrun waits for the other nodes before it
    starts a rank, so it must end with its starter, too.
    """
    group = service.group
    launcher: list[str] = []
    if group.size > 1:
        host, _, port = group.endpoint.rpartition(":")
        where = ["--standalone"] if group.nodes == 1 else [
            f"--nnodes={group.nodes}", f"--node-rank={node_rank}", f"--master-addr={host}", f"--master-port={port}",
            f"--rdzv-conf=timeout={group.timeout_s:.0f}",
        ]  # fmt: skip
        launcher = of_ranks(["torchrun", *where, f"--nproc-per-node={group.ranks}", "-m"])
    # -P: modules in the caller's working folder must not shadow those of the service
    return [service.python, "-P", "-m", *launcher, service.module, *service.arguments]


def run_node(service: Service, node_rank: int) -> int:
    """Run a further node of a service in the foreground until its group ends; returns its exit code."""
    return run_in_foreground(command_of(service, node_rank), {**os.environ, **service.env})


def wait_for_lease(
    path: Path,
    process: psutil.Process,
    timeout_s: float,
    log_file: Path,
    look: Callable[[], None] = lambda: None,
    poll_s: float = POLL_S,
) -> Lease:
    """Wait until the lease of ``process`` or of a child of it is at ``path``, and call ``look`` meanwhile.

    Raises ``StartError`` with the log's last lines as soon as the process ends, after ``timeout_s``, or if it was
    stopped (SIGSTOP) for ``STOPPED_S``; also if the command of this thread was interrupted.
    """
    born, stopped = process.create_time() if process.is_running() else time.time(), _Stopped(process)
    deadline = time.monotonic() + timeout_s
    while True:
        lease = read_lease(path)
        if lease is not None and lease.create_time >= born - CREATE_TIME_TOLERANCE_S and lease.alive:
            return lease
        name = f"Process '{log_file.stem}'"
        if not runs(process):
            code = exit_code(process)
            text = f"{name} ended (exit code {code}) before it was ready. {tail(log_file)}"
            raise StartError(text, code, last_lines(log_file, 1).strip() if log_file.exists() else "", process.pid)
        if time.monotonic() > deadline:
            raise StartError(f"{name} was not ready after {timeout_s:.0f} s. {tail(log_file)}")
        if stopped.seconds() > STOPPED_S:
            raise StartError(f"{name} was stopped (SIGSTOP) while it started, for {STOPPED_S:.0f} s. {tail(log_file)}")
        check_interrupted(name)
        look()
        time.sleep(poll_s)


class _Stopped:
    """For how long a process, or one of its descendants, has been stopped; looked up once a second."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._looked_at = process, time.monotonic()
        self._since: float | None = None

    def seconds(self) -> float:
        """0 while nothing is stopped. A starting process sends no heartbeats, so only this shows that it hangs."""
        now = time.monotonic()
        if now - self._looked_at >= 1.0:
            self._looked_at = now
            self._since = (self._since or now) if is_stopped(self._process) else None
        return 0.0 if self._since is None else now - self._since


def _lease_of(service: Service, generation: int, process: psutil.Process) -> Lease:
    """The lease of a service that does not write it itself."""
    return Lease(
        service.name, process.pid, process.create_time(), service.host, service.port, "", service.digest, time.time(),
        {}, generation,
    )  # fmt: skip


def _answers(lease: Lease) -> bool:
    process = holder(lease)
    if process is None or is_stopped(root_of(lease) or process):
        return False
    address = lease.address("")
    with suppress(httpx.HTTPError):
        headers = {"Authorization": f"Bearer {lease.token}"}
        url, tls = f"{address.url}/health", tls_context()
        return httpx.get(url, headers=headers, timeout=_HEALTH_S, trust_env=False, verify=tls).is_success
    return False


def _end_processes(path: Path, lease: Lease, grace_s: float, shutdown_path: str, alone: bool, others: bool) -> bool:
    """End the processes of a lease and remove it; returns whether its holder was alive.

    ``alone``: kill only the holder. ``others``: also processes that earlier holders have left.
    """
    process, root = holder(lease), root_of(lease)
    if shutdown_path and process is not None and _answers(lease):
        headers = {"Authorization": f"Bearer {lease.token}"}
        url = f"{lease.address('').url}{shutdown_path}"
        with (
            suppress(httpx.HTTPError),
            httpx.stream("POST", url, json={}, headers=headers, timeout=grace_s, trust_env=False) as answer,
        ):
            for _ in answer.iter_bytes():
                pass
            wait_until_ended([process, *([] if root is None else [root])], grace_s)
    if alone and process is not None:
        process.kill()
        wait_until_ended([process], grace_s)
    else:
        stop_holder(lease, grace_s, others)
    remove_lease(path, lease.pid)
    return process is not None


def path_of_package(logs: Path) -> str:
    """PYTHONPATH for another environment's interpreter: it can import only this package from this environment."""
    link = logs / "path" / "rft_platform"
    package = Path(__file__).parents[2]
    if not (link.is_symlink() and link.resolve() == package):
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_dir() and not link.is_symlink():  # the home was copied by a tool that follows links
            shutil.rmtree(link)
        fresh = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
        fresh.symlink_to(package)
        fresh.replace(link)
    return os.pathsep.join(filter(None, [str(link.parent.absolute()), os.environ.get("PYTHONPATH")]))


def _processor_seconds_of(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(used.user + used.system)
