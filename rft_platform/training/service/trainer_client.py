"""Client of the trainer group: finds it by its lease or starts it, sends commands, receives events. No torch here.

While a command waits or runs, the group sends heartbeats. A group that sends nothing for ``heartbeat_timeout_s`` (it is
stopped, or hangs) is ended, and the command fails with a retryable TrainerError.
"""

import json
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
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
from rft_platform.common.processes.usage import note_use
from rft_platform.common.user_code import OWN_SAFE_PATH, SAFE_PATH
from rft_platform.observability.log_context import context_headers
from rft_platform.training.launch import Rendezvous, TrainerSpec, command
from rft_platform.training.protocol import (
    HEARTBEAT,
    HEARTBEAT_TIMEOUT_S,
    LAST_EVENTS,
    PREFIX,
    Layout,
    Message,
    StepEvent,
    TrainRequest,
    TrainResult,
    raise_error,
)

STOP_TIMEOUT_S = 10.0
SILENT_STOP_TIMEOUT_S = 3.0  # a hanging group is not expected to exit on its own
START_LOCK_TIMEOUT_S = 60.0  # wait for another caller that starts the group, in addition to the start time limit
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 10.0  # time-out of status and cancel, which are answered at once


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
        # A proxy set in the environment must not get requests to the loopback interface.
        self._http = httpx.Client(trust_env=False)
        weakref.finalize(self, self._http.close)

    def train(self, request: TrainRequest, on_step: Callable[[StepEvent], None] | None = None) -> TrainResult:
        """Train and publish; ``on_step`` is called after every optimiser step.

        If the group has died before, a new group is started first. Raises the error of the training, or TrainerError if
        the group dies during the training or was ended because its heartbeat stopped. The same request can then be sent
        again: the training starts from its parent.
        """
        body = {"request": asdict(request)}
        try:
            result = self._run("train", body, on_step)
        except _NotAccepted as refusal:
            self.ensure_running(refusal.lease)
            result = self._run("train", body, on_step)
        return TrainResult(**result["result"])

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of each token under the held weights, at temperature 1; the first token's is 0.0."""
        answer = self._run("score", {"sequences": [list(map(int, ids)) for ids in sequences]})
        logprobs: list[list[float]] = answer["logprobs"]
        return logprobs

    def status(self) -> dict[str, Any]:
        """pid, device, world_size, dtype, checkpoint, policy_version, weights_digest, cpu_seconds, peak_rss_mb, busy.

        ``cpu_seconds`` is the processor time of all local ranks and their launcher since the start.
        """
        return self._ask("status")

    def cancel(self) -> bool:
        """End a running training before its next optimiser step. Return False if none is running."""
        return bool(self._ask("cancel")["cancelled"])

    def shutdown(self) -> None:
        """End the group after the command that it runs. Does nothing if no group is running.

        A group that stops sending heartbeats is ended without waiting for its command.
        """
        lease = read_lease(self._spec.lease)
        if lease is None or not is_alive(lease):
            return
        with suppress(TrainerError):
            self._run("shutdown", {})
            _wait(lease)
        stop_holder(lease)

    def ensure_running(self, refused: Lease | None = None) -> None:
        """Start the group unless it runs with the right settings. Replace the group ``refused``, which is about to end.

        Raises TrainerError if the group does not start.
        """
        with locked(self._spec.lease, START_LOCK_TIMEOUT_S + self._spec.start_timeout_s):
            note_use(self._spec.lease)
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
        end_strays(spec.lease)  # processes of a killed starter: two groups would write to one log and one lease
        own = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", SAFE_PATH: OWN_SAFE_PATH}
        devices = {} if spec.gpus is None else {"CUDA_VISIBLE_DEVICES": spec.gpus}
        env = os.environ | own | devices | lease_environment(spec.lease)
        process = start_detached(command(spec), spec.log, env)
        try:
            wait_for_lease(spec.lease, process, spec.start_timeout_s, spec.log)
        except StartError as error:
            stop_process(process)
            raise TrainerError(str(error)) from error

    def _ask(self, command: str) -> dict[str, Any]:
        """Send a command that is answered at once. Raises TrainerError if no group answers in time."""
        lease = self._lease()
        try:
            response = self._http.post(_url(lease, command), json={}, headers=_headers(lease), timeout=ANSWER_TIMEOUT_S)
        except httpx.TimeoutException as error:
            limit = f"{ANSWER_TIMEOUT_S:g} s"
            raise TrainerError(
                f"the trainer group (pid {lease.pid}) did not answer {command!r} within {limit}"
            ) from error
        except httpx.TransportError as error:
            raise TrainerError(self._ended(command)) from error
        _check(response)
        answer: dict[str, Any] = response.json()
        return answer

    def _run(self, command: str, body: Message, on_step: Callable[[StepEvent], None] | None = None) -> Message:
        """Queue a command and return its last event; raise its error, if any."""
        for event in self._events(command, body):
            if event["event"] == "step" and on_step is not None:
                on_step(StepEvent(event["step"], event["metrics"], event["told_again"]))
            last = event
        if last["event"] == "error":
            raise_error(last)
        return last

    def _events(self, command: str, body: Message) -> Iterator[Message]:
        """Queue a command and yield its events up to the last, without heartbeats.

        Raises TrainerError if the group dies before that, or sends nothing in time.
        """
        lease, heard = self._lease(), False
        limit = self._spec.heartbeat_timeout_s
        timeout = httpx.Timeout(limit, connect=min(CONNECT_TIMEOUT_S, limit))
        url, content = _url(lease, command), json.dumps(body).encode()
        try:
            with self._http.stream("POST", url, content=content, headers=_headers(lease), timeout=timeout) as response:
                if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    raise _NotAccepted(self._ended(command), lease)
                _check(response)
                for line in response.iter_lines():
                    heard, event = True, json.loads(line)
                    if event["event"] != HEARTBEAT:
                        yield event
                    if event["event"] in LAST_EVENTS:
                        return
            cause = None
        except httpx.TimeoutException as error:
            self._end_silent(lease)
            text = (
                f"the trainer group (pid {lease.pid}) sent no heartbeat for {limit:g} s during {command!r} "
                "(it was stopped, or hangs) and was ended; make the same request again"
            )
            raise (TrainerError(text) if heard else _NotAccepted(text, lease)) from error
        except httpx.TransportError as error:
            cause = error
        text = self._ended(command)
        raise (TrainerError(text) if heard else _NotAccepted(text, lease)) from cause

    def _lease(self) -> Lease:
        lease = read_lease(self._spec.lease)
        if lease is None or not is_alive(lease):
            raise _NotAccepted("no trainer group is running: train first, or call find_or_start_trainer", lease)
        return lease

    def _ended(self, command: str) -> str:
        log = f"Last lines of {self._spec.log}:\n{last_lines(self._spec.log)}"
        return f"the trainer group ended during {command!r}; make the same request again. {log}"

    def _end_silent(self, lease: Lease) -> None:
        """End a hanging group and remove its lease. Takes no lock, because ``ensure_running`` may hold it."""
        stop_holder(lease, SILENT_STOP_TIMEOUT_S)
        remove_lease(self._spec.lease, lease.pid)


class _NotAccepted(TrainerError):
    """The command did not reach a trainer group; ``lease`` is the lease of the group to which it was sent."""

    def __init__(self, message: str, lease: Lease | None) -> None:
        super().__init__(message)
        self.lease = lease


def _code_changed_at() -> float:
    """Modification time of the newest source file that a worker runs, in seconds since the epoch."""
    package = Path(rft_platform.__file__).parent
    return max(file.stat().st_mtime for room in ("training", "algorithms") for file in (package / room).rglob("*.py"))


def _url(lease: Lease, command: str) -> str:
    return f"http://{lease.host}:{lease.port}{PREFIX}{command}"


def _headers(lease: Lease) -> dict[str, str]:
    return context_headers() | {"Authorization": f"Bearer {lease.token}", "Content-Type": "application/json"}


def _check(response: httpx.Response) -> None:
    """Raise TrainerError for a response that refuses the command."""
    if response.is_error:
        response.read()
        raise TrainerError(f"the trainer group refused the command ({response.status_code}): {response.text[:500]}")


def _wait(lease: Lease) -> None:
    """Wait until the group has ended: rank 0, and the launcher, which exits after the other ranks."""
    pids = [lease.pid, *([lease.details["launcher"]] if lease.details.get("launcher") else [])]
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    wait_until_ended(processes, STOP_TIMEOUT_S)
