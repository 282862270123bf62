"""Run one call on several replicas concurrently."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from rft_platform.errors import RftError
from rft_platform.inference.replicas import Replica

T = TypeVar("T")


def call_together(
    jobs: Sequence[tuple[Replica, Callable[[], T]]], abort: Callable[[Replica], None] | None = None
) -> list[T | RftError]:
    """The result of each job, or the RftError that it raised, in order.

    If the wait is interrupted (Ctrl-C, a cancelled run), ``abort`` is called for each replica: a thread that waits for
    an answer cannot be stopped, but the replica's work can.
    """
    if len(jobs) == 1:  # run in the caller's own thread, where an interruption closes the connection
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
