"""Client of the trainer group: finds it by its lease or starts it, sends commands, receives events. No torch here.

While a command waits or runs, the group sends heartbeats. A group that sends nothing for ``heartbeat_timeout_s`` (it is
stopped, or hangs) is ended, and the command fails with a retryable TrainerError.
"""

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import httpx

from rft_platform.cluster.interface import Address, Cluster, Service, StartError, tls_context
from rft_platform.common.errors import TrainerError
from rft_platform.observability.log_context import context_headers
from rft_platform.training.launch import trainer_service
from rft_platform.training.protocol import (
    HEARTBEAT,
    HEARTBEAT_TIMEOUT_S,
    LAST_EVENTS,
    PREFIX,
    Message,
    OnRepeat,
    StepEvent,
    TrainRequest,
    TrainResult,
    raise_error,
)

SILENT_STOP_TIMEOUT_S = 3.0  # a hanging group is not expected to exit on its own
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 10.0  # time-out of status and cancel, which are answered at once


def find_or_start_trainer(
    cluster: Cluster, *, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S, **options: Any
) -> "TrainerClient":
    """A client of a running trainer group with the ``options`` of ``trainer_service``. Another group is replaced.

    Raises TrainerError with the last lines of the log if the group does not start.
    """
    client = TrainerClient(cluster, trainer_service(**options), heartbeat_timeout_s)
    client.ensure_running()
    return client


class TrainerClient:
    """Client of the trainer group. One command runs at a time and others wait, except ``status`` and ``cancel``."""

    def __init__(self, cluster: Cluster, service: Service, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        """A group of ``cluster`` is ended if it sends no heartbeat for ``heartbeat_timeout_s`` during a command."""
        self._cluster, self._service, self._silence_s = cluster, service, heartbeat_timeout_s
        # A proxy set in the environment must not get requests to the loopback interface.
        self._http = httpx.Client(trust_env=False, verify=tls_context())
        weakref.finalize(self, self._http.close)

    def train(
        self,
        request: TrainRequest,
        on_step: Callable[[StepEvent], None] | None = None,
        on_repeat: OnRepeat | None = None,
    ) -> TrainResult:
        """Train and publish; ``on_step`` is called after every optimiser step.

        ``on_repeat`` is called before the group repeats earlier trainings, whose state was not saved.
        If the group has died before, a new group is started first. Raises the error of the training, or TrainerError if
        the group dies during the training or was ended because its heartbeat stopped. The same request can then be sent
        again: the training starts from its parent.
        """
        body = {"request": asdict(request)}
        try:
            result = self._run("train", body, on_step, on_repeat)
        except _NotAccepted:
            self.ensure_running()
            result = self._run("train", body, on_step, on_repeat)
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
        service = self._service
        self._cluster.stop(service.name, service.grace_s, shutdown_path=service.shutdown_path)

    def ensure_running(self) -> None:
        """Start the group unless it runs with the right settings and takes commands.

        Raises TrainerError if the group does not start.
        """
        try:
            self._cluster.ensure(self._service)
        except StartError as error:
            raise TrainerError(str(error)) from error

    def _ask(self, command: str) -> dict[str, Any]:
        """Send a command that is answered at once. Raises TrainerError if no group answers in time."""
        group = self._group()
        url = f"{group.url}{PREFIX}{command}"
        try:
            response = self._http.post(url, json={}, headers=_headers(group), timeout=ANSWER_TIMEOUT_S)
        except httpx.TimeoutException as error:
            limit = f"{ANSWER_TIMEOUT_S:g} s"
            raise TrainerError(
                f"the trainer group (pid {group.details['pid']}) did not answer {command!r} within {limit}"
            ) from error
        except httpx.TransportError as error:
            raise TrainerError(self._ended(command)) from error
        _check(response)
        answer: dict[str, Any] = response.json()
        return answer

    def _run(
        self,
        command: str,
        body: Message,
        on_step: Callable[[StepEvent], None] | None = None,
        on_repeat: OnRepeat | None = None,
    ) -> Message:
        """Queue a command and return its last event; raise its error, if any."""
        for event in self._events(command, body):
            if event["event"] == "step" and on_step is not None:
                on_step(StepEvent(event["step"], event["metrics"], event["reported_before"]))
            elif event["event"] == "repeat" and on_repeat is not None:
                on_repeat(event["steps"], event["trainings"])
            last = event
        if last["event"] == "error":
            raise_error(last)
        return last

    def _events(self, command: str, body: Message) -> Iterator[Message]:
        """Queue a command and yield its events up to the last, without heartbeats.

        Raises TrainerError if the group dies before that, or sends nothing in time.
        """
        group, heard = self._group(), False
        limit = self._silence_s
        timeout = httpx.Timeout(limit, connect=min(CONNECT_TIMEOUT_S, limit))
        url, content = f"{group.url}{PREFIX}{command}", json.dumps(body).encode()
        try:
            with self._http.stream("POST", url, content=content, headers=_headers(group), timeout=timeout) as response:
                if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    raise _NotAccepted(self._ended(command))
                _check(response)
                for line in response.iter_lines():
                    heard, event = True, json.loads(line)
                    if event["event"] != HEARTBEAT:
                        yield event
                    if event["event"] in LAST_EVENTS:
                        return
            cause = None
        except httpx.TimeoutException as error:
            self._cluster.stop(group.name, SILENT_STOP_TIMEOUT_S, generation=group.generation)
            text = (
                f"the trainer group (pid {group.details['pid']}) sent no heartbeat for {limit:g} s during {command!r} "
                "(it was stopped, or hangs) and was ended; make the same request again"
            )
            raise (TrainerError(text) if heard else _NotAccepted(text)) from error
        except httpx.TransportError as error:
            cause = error
        text = self._ended(command)
        raise (TrainerError(text) if heard else _NotAccepted(text)) from cause

    def _group(self) -> Address:
        group = self._cluster.find(self._service.name)
        if group is None:
            raise _NotAccepted("no trainer group is running: train first, or call find_or_start_trainer")
        return group

    def _ended(self, command: str) -> str:
        end = self._cluster.log_tail(self._service.name)
        return f"the trainer group ended during {command!r}; make the same request again. {end}"


class _NotAccepted(TrainerError):
    """The command did not reach a trainer group."""


def _headers(group: Address) -> dict[str, str]:
    return context_headers() | {"Authorization": f"Bearer {group.token}", "Content-Type": "application/json"}


def _check(response: httpx.Response) -> None:
    """Raise TrainerError for a response that refuses the command."""
    if response.is_error:
        response.read()
        raise TrainerError(f"the trainer group refused the command ({response.status_code}): {response.text[:500]}")
