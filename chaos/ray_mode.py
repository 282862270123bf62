"""Run a project with `rft run` on three raylets, its home copied to S3, Dagster's storage in Postgres; and its faults.

Besides processes, raylets are killed, S3 requests broken and connections to Postgres closed. A spare node joins after
each killed raylet; it must be used.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median

import psutil

from chaos.driver_mode import DriverMode
from chaos.injector import InjectionResult, inject
from chaos.process_table import HomeProcess, processes_of, processes_with_role
from chaos.progress_probe import current_progress, progress_mark, wait_for
from chaos.ray_platform import RayPlatform
from chaos.schedule import Kill, Mode
from chaos.scratch import Scratch
from rft_platform.common.files import write_text

_ACTOR, _RAYLET = "ray::", "raylet"
#: Probabilities of broken requests while a fault of S3 lasts.
_S3_RATES: dict[str, dict[str, float]] = {
    "s3_errors": {"500": 0.35, "503": 0.35},
    "s3_slow": {"slow": 0.8},
    "s3_truncated": {"truncated": 0.4, "lost": 0.3},
}
_LASTS_S = 8.0  # a fault of S3 or Postgres
_CLOSE_S = 0.5  # interval at which connections to Postgres are closed during a fault
_CLOSE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
_STORAGE = "storage:\n  postgres:\n    postgres_url: {url}\n"


@dataclass(slots=True)
class Spare:
    """A node that joined after a raylet was killed."""

    raylet: int  # process id
    joined_at: float
    used_s: float | None = None  # from its joining until a process of the project ran on it


@dataclass(slots=True)
class _Spares:
    """The spare nodes, which join in the background: a node needs some seconds to start."""

    platform: RayPlatform
    nodes: list[Spare] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)  # orders to the cluster, one at a time

    def replace(self, index: int) -> None:
        """Kill a raylet; a spare joins afterwards."""
        with self.lock:
            self.platform.nodes.kill(index)
        threading.Thread(target=self._join, daemon=True).start()

    def _join(self) -> None:
        with self.lock:
            index = self.platform.nodes.add()
            self.nodes.append(Spare(self.platform.nodes.pids()[index], time.monotonic()))

    def note_use(self, processes: list[HomeProcess]) -> None:
        """Note which spares run a process of the project."""
        unused = {spare.raylet: spare for spare in self.nodes if spare.used_s is None}
        if unused:
            for process in processes:
                for pid in {parent.pid for parent in ancestors(process.pid)} & unused.keys():
                    spare = unused.pop(pid)
                    spare.used_s = round(time.monotonic() - spare.joined_at, 2)


class RayMode(DriverMode):
    """`rft run` on a Ray cluster. Implements ``supervisor.ProjectRunner``."""

    mode: Mode = "ray"

    def __init__(self, scratch: Scratch, name: str, platform: RayPlatform) -> None:
        super().__init__(scratch, name)
        self.platform, self._spares = platform, _Spares(platform)
        self._database, self._fault_ends, self._closed_at = name, 0.0, 0.0
        self._closes_connections = False
        self.config = scratch.write_ray_config(name, platform.nodes.address, platform.bucket(name))
        if (url := platform.database(name)) is not None:
            write_text(self.home.root / "dagster" / "dagster.yaml", _STORAGE.format(url=url))

    def maintain(self) -> None:
        """Restart the driver, end faults of S3 and Postgres in time, and note which spare nodes are used."""
        super().maintain()
        now = time.monotonic()
        if self._closes_connections and now - self._closed_at > _CLOSE_S:
            self._close_connections()
        if self._fault_ends and now > self._fault_ends:
            self._fault_ends, self._closes_connections = 0.0, False
            self.platform.proxy.set_rates()
        self._spares.note_use(processes_of(self.home))

    def stop(self) -> None:
        """End the driver, and the faults of S3 and Postgres."""
        self._closes_connections = False
        self.platform.proxy.set_rates()
        super().stop()

    def facts(self) -> dict[str, float]:
        """Spare nodes, those that were used or killed before, the seconds until their use, and broken requests."""
        used = [spare.used_s for spare in self._spares.nodes if spare.used_s is not None]
        killed = sum(spare.used_s is None and not psutil.pid_exists(spare.raylet) for spare in self._spares.nodes)
        found = {"spare_nodes": float(len(self._spares.nodes) - killed), "spare_nodes_used": float(len(used))}
        found |= {f"s3_requests_{kind}": float(count) for kind, count in self.platform.proxy.injected.items()}
        return found | ({"spare_used_s_median": median(used), "spare_used_s_max": max(used)} if used else {})

    def inject(self, kill: Kill, timeout_s: float) -> InjectionResult:
        """Kill a process, the actor that started it or a raylet, or begin to break requests or connections."""
        if kill.target in _S3_RATES:
            return self._break_requests(kill.target, timeout_s)
        if kill.target == "postgres":
            return self._break_connections(timeout_s)
        if kill.target.startswith(_RAYLET):
            return self._kill_raylet(kill, timeout_s)
        result = inject(self.home, kill, timeout_s, self.expected, lambda: list(self._victims(kill.target)))
        has_successor = kill.target in ("driver", "engine", "trainer")  # others may be missing until they are needed
        return result if has_successor else replace(result, before=frozenset())

    def _victims(self, target: str) -> Iterator[HomeProcess]:
        """The processes of a role, or the actors that have started them."""
        role = target.removesuffix("_actor")
        for member in processes_with_role(self.home, role):
            if role == target:
                yield member
            elif (actor := _actor_of(member)) is not None:
                yield actor

    def _kill_raylet(self, kill: Kill, timeout_s: float) -> InjectionResult:
        """Kill a raylet beside the head's, if possible one with processes of the phase; a spare node joins."""
        progress = current_progress(self.home)
        role = "trainer" if progress.half[1] else "worker"
        wait_for(lambda: bool(processes_with_role(self.home, role)), min(timeout_s, 5.0), 0.05)
        with self._spares.lock:
            raylets = self.platform.nodes.pids()
        parents = [ancestor.pid for each in processes_with_role(self.home, role) for ancestor in ancestors(each.pid)]
        busy = sorted(index for index, pid in raylets.items() if pid in parents)
        index = (busy or sorted(raylets))[kill.number % len(busy or raylets)]
        progress = current_progress(self.home)
        self._spares.replace(index)
        return InjectionResult(f"raylet {index} (pid {raylets[index]}), with {role}: {bool(busy)}", progress)

    def _break_requests(self, kind: str, timeout_s: float) -> InjectionResult:
        injected = self.platform.proxy.injected
        before = injected.total()
        self.platform.proxy.set_rates(**_S3_RATES[kind])
        hit = wait_for(lambda: injected.total() > before, timeout_s)
        self._fault_ends = time.monotonic() + _LASTS_S
        victim = f"requests to S3 for {_LASTS_S:.0f} s: {_S3_RATES[kind]}"
        return InjectionResult(victim if hit else None, current_progress(self.home), mark=progress_mark(self.home))

    def _break_connections(self, timeout_s: float) -> InjectionResult:
        hit = self.platform.postgres is not None and wait_for(lambda: self._close_connections() > 0, timeout_s, 0.1)
        self._fault_ends, self._closes_connections = time.monotonic() + _LASTS_S, hit
        victim = f"connections to Postgres for {_LASTS_S:.0f} s" if hit else None
        return InjectionResult(victim, current_progress(self.home), mark=progress_mark(self.home))

    def _close_connections(self) -> int:
        self._closed_at = time.monotonic()
        return self.platform.execute(_CLOSE.format(name=self._database))


def ancestors(pid: int) -> list[psutil.Process]:
    """The processes above a process, its parent first; empty if it has ended."""
    try:
        return psutil.Process(pid).parents()
    except psutil.Error:
        return []


def _actor_of(member: HomeProcess) -> HomeProcess | None:
    """The process of the Ray actor that has started a process."""
    for parent in ancestors(member.pid):
        try:
            command = parent.cmdline()
            if command and command[0].startswith(_ACTOR):
                return HomeProcess(parent.pid, parent.create_time(), f"{member.role}_actor", parent.ppid(), (*command,))
        except psutil.Error:
            return None
    return None
