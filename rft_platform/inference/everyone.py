"""Broadcast a call to all replicas of a pool; distinguish a refusal from a lost replica."""

import threading
from collections.abc import Callable
from typing import TypeVar

import httpx

from rft_platform.errors import EngineError, RftError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.fan_out import call_together
from rft_platform.inference.replicas import Replica, Replicas

T = TypeVar("T")


class Everyone:
    """Calls all active replicas concurrently."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def answers(self, call: Callable[[EngineClient], T]) -> list[T]:
        """The replicas' answers, ordered by replica number; raises the first error that a replica returns."""
        answers = []
        for outcome in self.outcomes(call).values():
            if isinstance(outcome, RftError):
                raise outcome
            answers.append(outcome)
        return answers

    def outcomes(self, call: Callable[[EngineClient], T]) -> dict[Replica, T | RftError]:
        """Answer or error of each replica; replicas that do not answer are omitted and marked down.

        Raises EngineError, naming each replica, if none answers.
        """
        serving = self._replicas.serving()

        def job(client: EngineClient) -> Callable[[], T]:
            return lambda: call(client)

        jobs = [(replica, job(replica.client)) for replica in serving]
        outcomes = dict(zip(serving, call_together(jobs) if jobs else [], strict=True))
        for replica, outcome in list(outcomes.items()):
            if isinstance(outcome, RftError) and self.is_gone(replica, outcome):
                del outcomes[replica]
        if not outcomes:
            raise self._replicas.none_left()
        return outcomes

    def is_gone(self, replica: Replica, error: RftError) -> bool:
        """Whether ``error`` means that the process no longer answers; if so, mark the replica down."""
        if not isinstance(error.__cause__, httpx.HTTPError):
            try:
                replica.client.status()
                return False
            except EngineError as silence:
                error = silence
        self._replicas.mark_down(replica, str(error))
        return True

    def look_at(self, replica: Replica) -> None:
        """Request the status of a replica without recent work, in a thread.

        The request resets the replica's idle time-out and detects a dead process.
        """
        threading.Thread(target=self._ask, args=(replica,), name=f"ask-replica-{replica.number}", daemon=True).start()

    def _ask(self, replica: Replica) -> None:
        try:
            replica.client.status()
        except RftError as error:
            self.is_gone(replica, error)
