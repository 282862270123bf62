"""Broadcast a call to all replicas of a pool; distinguish a refusal from a lost replica."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

import httpx

from rft_platform.common.errors import EngineError, RftError
from rft_platform.inference.client import EngineClient
from rft_platform.inference.pool.replicas import Replica, Replicas

T = TypeVar("T")


class Broadcaster:
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

    def probe(self, replica: Replica) -> None:
        """Request the status of a replica without recent work, in a thread.

        The request resets the replica's idle time-out and detects a dead process.
        """
        threading.Thread(
            target=self._probe, args=(replica,), name=f"probe-replica-{replica.number}", daemon=True
        ).start()

    def _probe(self, replica: Replica) -> None:
        try:
            replica.client.status()
        except RftError as error:
            self.is_gone(replica, error)


def call_together(
    jobs: Sequence[tuple[Replica, Callable[[], T]]], abort: Callable[[Replica], None] | None = None
) -> list[T | RftError]:
    """The result of each job, or the RftError that it raised, in order.

    If the wait is interrupted (Ctrl-C, a cancelled run), ``abort`` is called for each replica: it ends the replica's
    work, because a thread that waits for an answer cannot be stopped.
    """
    if len(jobs) == 1:  # run the job in the caller's thread, where an interruption closes the connection
        return [_outcome(jobs[0][1])]
    threads = ThreadPoolExecutor(len(jobs), "replica")
    try:
        futures = [threads.submit(copy_context().run, _outcome, job) for _, job in jobs]
        return [future.result() for future in futures]
    except BaseException:
        for replica, _ in jobs if abort is not None else []:
            with suppress(RftError):
                abort(replica)  # type: ignore[misc]
        raise
    finally:
        threads.shutdown(wait=False)


def _outcome(job: Callable[[], T]) -> T | RftError:
    try:
        return job()
    except RftError as error:
        return error
