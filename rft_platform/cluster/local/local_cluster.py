"""Services as processes of this machine: found by their lease files, or started."""

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import httpx
import psutil

from rft_platform.cluster.interface import Address, Service, StartError, tls_context
from rft_platform.cluster.local.leases import (
    Lease,
    end_strays,
    holder,
    leases_started_below,
    note_use,
    read_lease,
    release,
    remove_lease,
    root_of,
    stop_holder,
)
from rft_platform.cluster.local.locks import LOCK_TIMEOUT_S, locked
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
from rft_platform.cluster.local.service_process import service_environment
from rft_platform.common.errors import TransientError
from rft_platform.common.files import last_lines, write_text
from rft_platform.common.progress import announce

_HEALTH_S = 10.0  # time-out of one request to /health
_LOOK_S = 0.2
_START_WAIT_S = 15.0


class LocalCluster:
    """A ``Cluster`` of this machine; ``leases`` and ``logs`` are folders, with one file a service each."""

    def __init__(self, leases: Path, logs: Path) -> None:
        self.folder, self.logs = leases, logs

    def ensure(self, service: Service) -> Address:
        """Find the service by its lease, or start it, while holding the lock of the lease."""
        path = self.lease_file(service.name)
        wait_s = LOCK_TIMEOUT_S + service.answer_s + service.start_timeout_s
        with locked(path, wait_s):  # another caller may be starting the service
            note_use(path)
            lease = self._fitting(path, service) or self._start(path, service)
        return lease.address(service.name)

    def find(self, name: str) -> Address | None:
        """The address of the service ``name``; None if its process does not run."""
        lease = read_lease(self.lease_file(name))
        return lease.address(name) if lease is not None and lease.alive else None

    def stop(self, name: str, grace_s: float, *, generation: int | None = None, shutdown_path: str = "") -> bool:
        """End the service; without ``generation`` wait for a start under way, and end processes without a lease."""
        path = self.lease_file(name)
        if generation is not None:
            lease = read_lease(path)
            is_it = lease is not None and lease.generation == generation
            return is_it and _end(path, lease, grace_s, shutdown_path)
        if not self.folder.exists():
            return False
        with _start_waited_for(path):
            ran = _end(path, read_lease(path), grace_s, shutdown_path)
            end_strays(path, grace_s)
            return ran

    def answers(self, address: Address) -> bool:
        """Whether the service answers, and none of its processes is stopped."""
        lease = read_lease(self.lease_file(address.name))
        return lease is not None and lease.generation == address.generation and _answers(lease)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last lines that the service printed, below a line that says where they are."""
        return _tail(self.log_file(name), lines)

    def lease_file(self, name: str) -> Path:
        """The lease of a service."""
        return self.folder / f"{name}.json"

    def log_file(self, name: str) -> Path:
        """Where a service prints to."""
        return self.logs / f"{name}.log"

    def leases(self, *patterns: str) -> dict[str, Lease]:
        """The leases by name, whether their processes run or not; with ``patterns``, those of matching names only."""
        files = sorted({file for each in patterns or ("*",) for file in self.folder.glob(f"{each}.json")})
        return {file.stem: lease for file in files if (lease := read_lease(file)) is not None}

    def running(self, *patterns: str) -> list[Address]:
        """The addresses of the running services; with ``patterns``, of those with matching names."""
        return [lease.address(name) for name, lease in self.leases(*patterns).items() if lease.alive]

    def wait_for_starts(self, *patterns: str) -> None:
        """Wait for services that are being started: a pool restarts lost replicas in the background."""
        for lock in [lock for each in patterns for lock in self.folder.glob(f"{each}.json.lock")]:
            # if a process takes longer to start, ``stop_strays`` finds it by its environment and ends it
            with _start_waited_for(lock.with_suffix("")):
                pass

    def stop_strays(self) -> list[int]:
        """End processes that were started for a lease but do not hold one; returns their ids."""
        return [pid for path in leases_started_below(self.folder) for pid in end_strays(path)]

    def stop_all(self) -> None:
        """End all services, and processes without a lease."""
        for name in self.leases():
            self.stop(name, 10.0)
        self.stop_strays()

    def _fitting(self, path: Path, service: Service) -> Lease | None:
        """The running process of ``service``; None if there is none. A process that does not fit or answer is ended."""
        silent_at = time.monotonic() + service.answer_s
        while (lease := read_lease(path)) is not None and lease.alive:
            fits = lease.digest == service.digest
            if fits and _answers(lease):
                return lease
            if not fits or time.monotonic() > silent_at:
                _end(path, lease, service.grace_s, service.shutdown_path)
                return None
            time.sleep(_LOOK_S)
        if lease is not None:
            remove_lease(path, lease.pid)
        return None

    def become(self, service: Service) -> NoReturn:
        """Replace this process by the service, which then prints to this terminal and gets this process's signals."""
        command = command_of(service)
        with locked(self.lease_file(service.name)):
            env = self._environment(service)
        os.execvpe(command[0], command, env)

    def _environment(self, service: Service) -> dict[str, str]:
        """The environment of the next generation of a service. The caller holds the start lock."""
        path = self.lease_file(service.name)
        counter = path.with_suffix(".generation")
        generation = 1 + (int(text) if counter.exists() and (text := counter.read_text().strip()).isdigit() else 0)
        write_text(counter, str(generation))
        paths = {"PYTHONPATH": path_of_package(self.logs)} if service.python != sys.executable else {}
        return {**os.environ, **paths, **service_environment(service, path, generation)}

    def _start(self, path: Path, service: Service) -> Lease:
        end_strays(path, service.grace_s)  # of a starter that was killed before the lease was written
        log = self.log_file(service.name)
        progress = StartProgress(service, log)
        process = start_detached(command_of(service), log, self._environment(service))
        try:
            return wait_for_lease(path, process, service.start_timeout_s, log, progress)
        except StartError:
            stop_process(process, service.grace_s)
            raise


class StartProgress:
    """Announces the stages of a service that is about to start, from the lines that it adds to its log."""

    def __init__(self, service: Service, log: Path) -> None:
        self._service, self._log = service, log
        self._read = log.stat().st_size if log.exists() else 0
        self._stage = ""

    def update(self) -> None:
        """Announce the stage of the newest line that names one, if it is another stage."""
        if not self._service.stages or not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        complete = added[: max(added.rfind(b"\n"), added.rfind(b"\r")) + 1]  # a progress bar ends its states with \r
        self._read += len(complete)
        lines = complete.decode(errors="replace").splitlines()
        reached = [stage for line in lines for text, stage in self._service.stages.items() if text in line]
        if reached and reached[-1] != self._stage:
            self._stage = reached[-1]
            announce(f"{self._service.name}: {self._stage}")


def end_use(lease_file: Path, starter: str | None) -> None:
    """End this command's use of a service; end the service if a command started it and none uses it.

    ``starter`` is the name of this command; None if the command leaves the service running.
    """
    with _start_waited_for(lease_file):
        if not release(lease_file) or starter is None:
            return
        lease = read_lease(lease_file)
        if lease is not None and lease.started_by is not None:
            _end(lease_file, lease, 10.0)
            end_strays(lease_file)
        end_strays(lease_file, starter=starter)  # processes whose start takes too long or was interrupted


def processor_seconds(lease: Lease) -> float:
    """Processor time that a service's processes have used since their start."""
    root = root_of(lease)
    return 0.0 if root is None else sum(map(_used, [root, *root.children(recursive=True)]))


def command_of(service: Service, node_rank: int = 0) -> list[str]:
    """The command line of a service; of one of its nodes, if it has several.

    A single rank needs no torchrun, which adds 1.8 s and a second process.
    """
    group = service.group
    launcher: list[str] = []
    if group.size > 1:
        host, _, port = group.endpoint.rpartition(":")
        where = ["--standalone"] if group.nodes == 1 else [
            f"--nnodes={group.nodes}", f"--node-rank={node_rank}", f"--master-addr={host}", f"--master-port={port}",
            f"--rdzv-conf=timeout={group.timeout_s:.0f}",
        ]  # fmt: skip
        launcher = ["torch.distributed.run", *where, f"--nproc-per-node={group.ranks}", "-m"]
    # -P: modules in the caller's working folder must not shadow those of the service
    return [service.python, "-P", "-m", *launcher, service.module, *service.arguments]


def run_node(service: Service, node_rank: int) -> int:
    """Run a further node of a service in the foreground until its group ends; returns its exit code."""
    return run_in_foreground(command_of(service, node_rank), {**os.environ, **service.env})


def wait_for_lease(
    path: Path, process: psutil.Process, timeout_s: float, log_file: Path, progress: StartProgress | None = None
) -> Lease:
    """Wait until ``process`` or a child of it has written its lease at ``path``, and update ``progress`` meanwhile.

    Raises ``StartError`` with the log's last lines as soon as the process ends, or after ``timeout_s``.
    """
    born = process.create_time() if process.is_running() else time.time()
    deadline = time.monotonic() + timeout_s
    while True:
        lease = read_lease(path)
        if lease is not None and lease.create_time >= born - CREATE_TIME_TOLERANCE_S and lease.alive:
            return lease
        name = f"Process '{log_file.stem}'"
        if not runs(process):
            code = exit_code(process)
            text = f"{name} ended (exit code {code}) before it was ready. {_tail(log_file)}"
            raise StartError(text, code, last_lines(log_file, 1).strip() if log_file.exists() else "")
        if time.monotonic() > deadline:
            raise StartError(f"{name} was not ready after {timeout_s:.0f} s. {_tail(log_file)}")
        if progress is not None:
            progress.update()
        time.sleep(POLL_S)


def _tail(log_file: Path, lines: int = 20) -> str:
    if not log_file.exists():
        return f"It wrote no log at {log_file}."
    return f"Last lines of {log_file}:\n{last_lines(log_file, lines)}"


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


def _end(path: Path, lease: Lease | None, grace_s: float, shutdown_path: str = "") -> bool:
    """End the processes of a lease and remove it; returns whether its holder was alive."""
    if lease is None:
        return False
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
    stop_holder(lease, grace_s)
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


@contextmanager
def _start_waited_for(path: Path) -> Iterator[None]:
    """Prevent that a process is started for a lease during the block.

    Waits up to ``_START_WAIT_S`` seconds until a running start has ended, then begins the block in any case.
    """
    with ExitStack() as stack:
        with suppress(TransientError):
            stack.enter_context(locked(path, _START_WAIT_S))
        yield


def _used(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(used.user + used.system)
