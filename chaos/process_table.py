"""List the processes that belong to a home, and determine their roles from environment and command line."""

from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from rft_platform.cluster.local.processes import find_process
from rft_platform.config.home import Home

#: Role and the words of its command line; the first match wins.
_ROLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("engine", ("rft_platform.inference.transformers_engine",)),
    ("engine", ("rft_platform.inference.vllm_engine.middleware.EnginePlanes",)),
    ("service", ("rft_platform.servers.online_service",)),
    ("trainer", ("rft_platform.training.service.worker",)),
    ("driver", ("rft_platform", "run", "--config")),
    ("daemon", ("dagster-daemon", "run")),
    ("webserver", ("rft_platform.servers.dagster_server",)),
    ("run_worker", ("dagster", "api", "execute_run")),
    ("run_worker", ("--multiprocessing-fork",)),  # the code server starts runs this way
    ("code_server", ("dagster", "api", "grpc")),
    ("mlflow", ("rft_platform.servers.mlflow_server",)),
)
_WORKER = '"rft_platform.rollout.workers.worker"'  # in the JSON argument of a child process


@dataclass(frozen=True, slots=True)
class HomeProcess:
    """A running process of a home."""

    pid: int
    created: float
    role: str  # "other" for processes without a known role
    parent: int
    command: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return find_process(self.pid, self.created) is not None

    def __str__(self) -> str:
        return f"{self.role} (pid {self.pid}: {' '.join(self.command)[:120]})"


def processes_of(home: Home) -> list[HomeProcess]:
    """Every running process whose environment or command line names ``home``."""
    return list(_iterate(home))


def processes_with_role(home: Home, role: str) -> list[HomeProcess]:
    """The running processes of a role, oldest first; child processes with the same role are omitted."""
    found = sorted((member for member in _iterate(home) if member.role == role), key=lambda member: member.created)
    pids = {member.pid for member in found}
    return [member for member in found if member.parent not in pids]


def _iterate(home: Home) -> Iterator[HomeProcess]:
    root = str(home.root)
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if process.environ().get("RFT_HOME") != root and not any(root in part for part in command):
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            yield HomeProcess(process.pid, process.create_time(), _role(command), process.ppid(), tuple(command))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _role(command: list[str]) -> str:
    if any(_WORKER in part for part in command):
        return "worker"
    for role, words in _ROLES:
        if all(word in command for word in words):
            return role
    return "other"
