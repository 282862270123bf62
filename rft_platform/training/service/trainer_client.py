"""Client of the trainer group: finds it by its lease or starts it, sends commands, receives events. No torch here.

While a command waits or runs, the group sends heartbeats. A group that sends nothing for ``heartbeat_timeout_s`` (it is
stopped, or hangs) is ended, and the command fails with a retryable TrainerError.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

import rft_platform
from rft_platform.common.errors import TrainerError
from rft_platform.common.files import last_lines
from rft_platform.common.locks import locked
from rft_platform.common.processes.lease import Lease, is_alive, read_lease, remove_lease
from rft_platform.common.processes.spawn import (
    StartError,
    start_detached,
    stop_holder,
    stop_process,
    wait_for_lease,
    wait_until_ended,
)
from rft_platform.common.processes.strays import end_strays, lease_environment
from rft_platform.common.user_code import OWN_SAFE_PATH, SAFE_PATH
from rft_platform.observability.log_context import current
from rft_platform.training.launch import Rendezvous, TrainerSpec, command
from rft_platform.training.protocol import (
    HEARTBEAT,
    HEARTBEAT_TIMEOUT_S,
    Layout,
    Message,
    StepEvent,
    TrainRequest,
    TrainResult,
    raise_error,
)
from rft_platform.training.service.rpc import Connection

STOP_TIMEOUT_S = 10.0
SILENT_STOP_TIMEOUT_S = 3.0  # a hanging group is not expected to exit on its own
START_LOCK_TIMEOUT_S = 60.0  # added to the time that another caller may need to start the group
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 10.0  # for commands that are answered at once: status and cancel
_AT_ONCE = ("status", "cancel")


def find_or_start_trainer(
    leases: Path,
    logs: Path,
    *,
    nproc: int = 1,
    threads: int = 1,
    dtype: str = "auto",
    idle_timeout_s: float = 900.0,
    device: str = "auto",
    layout: Layout | None = None,
    rendezvous: Rendezvous | None = None,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
) -> "TrainerClient":
    """Return a client of a running trainer group of ``nproc`` ranks per node. A group with other settings is replaced.

    ``dtype`` is ``auto`` (bfloat16 on CUDA, else float32), ``float32`` or ``bfloat16``; ``device`` is ``auto``, ``cpu``
    or ``cuda``. Raises TrainerError with the last lines of the log if the group does not start.
    """
    layout, rendezvous = layout or Layout(), rendezvous or Rendezvous()
    client = TrainerClient(
        TrainerSpec(
            leases,
            logs,
            nproc,
            threads,
            dtype,
            device,
            idle_timeout_s,
            layout,
            rendezvous,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
    )
    client.ensure_running()
    return client


class TrainerClient:
    """Client of the trainer group. One command runs at a time and others wait, except ``status`` and ``cancel``."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec

    def train(self, request: TrainRequest, on_step: Callable[[StepEvent], None] | None = None) -> TrainResult:
        """Train and publish; ``on_step`` is called after every optimiser step.

        If the group is found dead, it is started again first. Raises the error of the training, or TrainerError if the
        group dies during the training or was ended because its heartbeat stopped. The same request can then be sent
        again: it starts from its parent.
        """
        message = {"command": "train", "request": asdict(request)}
        try:
            result = self._converse(message, on_step)
        except _NotAccepted as refusal:
            self.ensure_running(refusal.lease)
            result = self._converse(message, on_step)
        return TrainResult(**result["result"])

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of each token under the held weights, at temperature 1; the first token's is 0.0."""
        answer = self._converse({"command": "score", "sequences": [list(map(int, ids)) for ids in sequences]})
        logprobs: list[list[float]] = answer["logprobs"]
        return logprobs

    def status(self) -> dict[str, Any]:
        """pid, device, world_size, dtype, checkpoint, policy_version, weights_digest, cpu_seconds, peak_rss_mb, busy.

        ``cpu_seconds`` is the processor time of all local ranks and their launcher since the start.
        """
        status: dict[str, Any] = self._converse({"command": "status"})["status"]
        return status

    def cancel(self) -> bool:
        """End a running training before its next optimiser step. Return False if none is running."""
        return bool(self._converse({"command": "cancel"})["cancelled"])

    def shutdown(self) -> None:
        """End the group after the command that it runs. Does nothing if no group is running.

        A group that stops sending heartbeats is ended without waiting for its command.
        """
        lease = read_lease(self._spec.lease)
        if lease is None or not is_alive(lease):
            return
        with suppress(TrainerError):
            self._converse({"command": "shutdown"})
            _wait(lease)
        stop_holder(lease)

    def ensure_running(self, refused: Lease | None = None) -> None:
        """Start the group unless it runs with the right settings. A group that ``refused`` a command is about to end.

        Raises TrainerError if it does not start.
        """
        with locked(self._spec.lease, START_LOCK_TIMEOUT_S + self._spec.start_timeout_s):
            lease = read_lease(self._spec.lease)
            if lease is not None and is_alive(lease):
                if lease != refused and self._fits(lease):
                    return
                self.shutdown()
            self._start()

    def _fits(self, lease: Lease) -> bool:
        """Whether the group has the requested settings and runs the code that is installed now."""
        spec = self._spec
        wanted = {
            "nproc": spec.ranks, "threads": spec.threads, "dtype": spec.dtype, "device": spec.device,
            "layout": asdict(spec.layout), "gpus": spec.gpus,
        }  # fmt: skip
        same = all(lease.details.get(name) == value for name, value in wanted.items())
        return same and lease.started_at > _code_changed_at()

    def _start(self) -> None:
        spec = self._spec
        threads = str(spec.threads)
        end_strays(spec.lease)  # left by a killed starter: two groups would write to one log and one lease
        own = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", SAFE_PATH: OWN_SAFE_PATH}
        devices = {} if spec.gpus is None else {"CUDA_VISIBLE_DEVICES": spec.gpus}
        env = os.environ | own | devices | lease_environment(spec.lease)
        process = start_detached(command(spec), spec.log, env)
        born = process.create_time()
        try:
            wait_for_lease(spec.lease, process, spec.start_timeout_s, spec.log)
        except StartError as error:
            stop_process(process.pid, born)
            raise TrainerError(str(error)) from error

    def _converse(self, message: Message, on_step: Callable[[StepEvent], None] | None = None) -> Message:
        """Send a command and return its last event; raise its error, if any."""
        for event in self._events(message):
            if event["event"] == "step" and on_step is not None:
                on_step(StepEvent(event["step"], event["metrics"], event.get("told_again", False)))
            last = event
        if last["event"] == "error":
            raise_error(last)
        return last

    def _events(self, message: Message) -> Iterator[Message]:
        """Send a command and yield its events up to the last, without heartbeats.

        Raises TrainerError if the group dies before that, or sends nothing in time.
        """
        lease = read_lease(self._spec.lease)
        if lease is None or not is_alive(lease):
            raise _NotAccepted("no trainer group is running: train first, or call find_or_start_trainer", lease)
        at_once = message["command"] in _AT_ONCE
        limit = ANSWER_TIMEOUT_S if at_once else self._spec.heartbeat_timeout_s
        heard, cause = False, None
        try:
            with closing(_connect(lease, limit)) as connection:
                connection.send_token(lease.token)
                connection.send(message | {"context": asdict(current())})
                for event in connection:
                    heard = True
                    if event["event"] == HEARTBEAT:
                        continue
                    yield event
                    if event["event"] in ("done", "error"):
                        return
        except TimeoutError as error:
            if at_once:
                text = f"the trainer group (pid {lease.pid}) did not answer {message['command']!r} within {limit:g} s"
                raise TrainerError(text) from error
            self._end_silent(lease)
            text = (
                f"the trainer group (pid {lease.pid}) sent no heartbeat for {limit:g} s during {message['command']!r} "
                "(it was stopped, or hangs) and was ended; make the same request again"
            )
            raise (TrainerError(text) if heard else _NotAccepted(text, lease)) from error
        except OSError as error:
            cause = error
        text = f"the trainer group ended during {message['command']!r}; make the same request again. {self._log()}"
        raise (TrainerError(text) if heard else _NotAccepted(text, lease)) from cause

    def _end_silent(self, lease: Lease) -> None:
        """End a hanging group and remove its lease. Takes no lock, because ``ensure_running`` may hold it."""
        stop_holder(lease, SILENT_STOP_TIMEOUT_S)
        remove_lease(self._spec.lease, lease.pid)

    def _log(self) -> str:
        return f"Last lines of {self._spec.log}:\n{last_lines(self._spec.log)}"


class _NotAccepted(TrainerError):
    """The command did not reach a trainer group; ``lease`` is that of the group it was sent to."""

    def __init__(self, message: str, lease: Lease | None) -> None:
        super().__init__(message)
        self.lease = lease


def _code_changed_at() -> float:
    """Modification time of the newest source file that a worker runs, in seconds since the epoch."""
    package = Path(rft_platform.__file__).parent
    return max(file.stat().st_mtime for room in ("training", "algorithms") for file in (package / room).rglob("*.py"))


def _connect(lease: Lease, timeout_s: float) -> Connection:
    """Open a connection whose reads and writes raise TimeoutError after ``timeout_s``."""
    connected = socket.create_connection((lease.host, lease.port), timeout=min(CONNECT_TIMEOUT_S, timeout_s))
    connected.settimeout(timeout_s)
    return Connection(connected)


def _wait(lease: Lease) -> None:
    """Wait for the group to exit: rank 0, and the launcher, which exits after the other ranks."""
    pids = [lease.pid, *([lease.details["launcher"]] if lease.details.get("launcher") else [])]
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    wait_until_ended(processes, STOP_TIMEOUT_S)
